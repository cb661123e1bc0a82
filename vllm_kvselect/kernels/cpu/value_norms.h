// Projected value norms of some entries, and bounds of all: scoring/value_norms.py and pruning.py. Only
// a tile of V W_O exists at a time.
#pragma once

#include <array>
#include <cmath>

#include "tiles.h"

namespace kvselect {

struct Entry {
  int32_t head, token;
};

// Fills in the norms of some entries, `[num_kv_heads, num_tokens]`; weights are packed by KV head,
// `[num_kv_heads, head_size, group * hidden_size]`.
template <typename T, typename M>
void project(const Tensor& value, const Tensor& weight, int64_t group,
             const std::vector<Entry>& entries, Tensor& norms) {
  constexpr int64_t kRows = 32;
  const int64_t head_size = value.size(2), width = weight.numel() / value.size(0) / head_size;
  const Tiles columns(width, 64);
  const T* values = value.const_data_ptr<T>();
  float* out = norms.mutable_data_ptr<float>();
  // Entries come head by head: a tile ends where the head does.
  std::vector<size_t> tile_starts;
  for (size_t i = 0; i < entries.size(); ++i)
    if (tile_starts.empty() || i - tile_starts.back() == kRows ||
        entries[i].head != entries[tile_starts.back()].head)
      tile_starts.push_back(i);
  tile_starts.push_back(entries.size());
  parallel_tiles<M>(tile_starts.size() - 1, [&] {
    return [&, rows = std::vector<M>(kRows * head_size, M(0)),
            products = std::vector<float>(kRows * columns.size)](int64_t tile) mutable {
      const Entry* chosen = &entries[tile_starts[tile]];
      const int64_t count = tile_starts[tile + 1] - tile_starts[tile], head = chosen->head;
      for (int64_t i = 0; i < count; ++i)
        at::vec::convert(values + head * value.stride(0) + chosen[i].token * value.stride(1),
                         &rows[i * head_size], head_size);
      const M* packed = weight.const_data_ptr<M>() + head * head_size * width;
      std::array<Vec, kRows> sums;
      sums.fill(Vec(0.f));
      for (int64_t part = 0; part < columns.count; ++part) {
        multiply(kRows, columns.size, head_size, rows.data(), head_size,
                 packed + columns.start(part) * kPair<M>, width, products.data());
        for (int64_t i = 0; i < count; ++i) {
          const float* row = &products[i * columns.size];
          int64_t n = columns.first_new(part);
          for (; n + kLanes <= columns.size; n += kLanes) sums[i] = sums[i] + Vec::loadu(row + n).abs();
          if (n < columns.size) sums[i] = sums[i] + Vec::loadu(row + n, columns.size - n).abs();
        }
      }
      for (int64_t i = 0; i < count; ++i)
        out[head * norms.stride(0) + chosen[i].token] = sum_lanes(sums[i]) / group;
    };
  });
}

// Upper bounds of the norms, `factor * sqrt(v F v^T)` with the form F `[num_kv_heads, D, D]`, which is
// stored as T, or as float where T has no room for squares.
template <typename T, typename M>
void bound_norms(const Tensor& value, const Tensor& form, float factor, float* bounds) {
  const int64_t num_tokens = value.size(1), head_size = value.size(2);
  const Tiles tiles(num_tokens, 64);
  std::vector<M> packed(form.numel());
  const auto pack_form = [&](const auto* in) {
    for (int64_t i = 0; i < form.numel(); i += head_size * head_size)
      pack(in + i, head_size, head_size, head_size, &packed[i]);
  };
  if (form.scalar_type() == at::kFloat) pack_form(form.const_data_ptr<float>());
  else pack_form(form.const_data_ptr<T>());
  parallel_tiles<M>(value.size(0) * tiles.count, [&] {
    return [&, products = std::vector<float>(tiles.size * head_size),
            rows = Rows<T, M>(tiles.size, head_size),
            row = std::vector<float>(head_size)](int64_t i) mutable {
      const int64_t head = i / tiles.count, tile = i % tiles.count, start = tiles.start(tile);
      rows.point_at(value.const_data_ptr<T>() + head * value.stride(0) + start * value.stride(1),
                    value.stride(1), tiles.size);
      multiply(tiles.size, head_size, head_size, rows.data, rows.stride,
               &packed[head * head_size * head_size], head_size, products.data());
      for (int64_t t = tiles.first_new(tile); t < tiles.size; ++t) {
        at::vec::convert(rows.data + t * rows.stride, row.data(), head_size);
        float sum = 0.f;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < head_size; ++k) sum += products[t * head_size + k] * row[k];
        bounds[head * num_tokens + start + t] = factor * std::sqrt(std::max(sum, 0.f));
      }
    };
  });
}

}  // namespace kvselect

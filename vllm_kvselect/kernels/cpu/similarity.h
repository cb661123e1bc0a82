// How much every key is like the others of its head: scoring/r_kv.py. Products of keys are those of
// the stored type, divided by both norms in float32: directions are never rounded to that type.
#pragma once

#include <cmath>
#include <optional>

#include "tiles.h"

namespace kvselect {

template <typename T, typename M>
class Similarity {
 public:
  // Tokens before `num_absent` [num_kv_heads] are in no head.
  Similarity(const Tensor& key, double threshold, const std::optional<Tensor>& num_absent)
      : key_(key), num_absent_(num_absent ? num_absent->const_data_ptr<int64_t>() : nullptr),
        threshold_(static_cast<float>(threshold)), num_tokens_(key.size(1)), head_size_(key.size(2)),
        num_panels_(divide_up(num_tokens_, kColumns)), tiles_(num_tokens_, 64),
        packed_(num_panels_ * kColumns * head_size_), inverse_norms_(num_panels_ * kColumns),
        latest_(num_tokens_), cosines_(num_tokens_) {}

  // The sum of each key's cosines with the other keys, [num_kv_heads, num_tokens] float. For every
  // key the latest one whose cosine is above the threshold gets nothing from it.
  Tensor sums() {
    Tensor sums = at::empty({key_.size(0), num_tokens_}, key_.options().dtype(at::kFloat));
    for (int64_t head = 0; head < key_.size(0); ++head) {
      float* out = sums.mutable_data_ptr<float>() + head * num_tokens_;
      pack_keys(head);
      // Cosines are symmetric: a key's row has the sum of its column.
      parallel_tiles<M>(tiles_.count, [&] {
        return [&, rows = Rows<T, M>(tiles_.size, head_size_), products = std::vector<float>(tiles_.size * kColumns),
                partial = std::vector<float>(tiles_.size * kLanes)](int64_t tile) mutable {
          sum_rows(head, tile, rows, products.data(), partial.data(), out);
        };
      });
      for (int64_t token = 0; token < num_tokens_; ++token)
        if (latest_[token] >= 0) out[latest_[token]] -= cosines_[token];
    }
    return sums;
  }

 private:
  static constexpr int64_t kColumns = 128;  // of a panel: with 64 rows its products fit into a first-level cache

  // Panels of `kColumns` keys as the right operands of products; absent keys have no direction, and
  // need not be numbers.
  void pack_keys(int64_t head) {
    const int64_t first = num_absent_ ? num_absent_[head] : 0;
    for (int64_t token = 0; token < num_tokens_; ++token) {
      const T* in = row(head, token);
      M* out = packed_.data() + token / kColumns * kColumns * head_size_;
      float square = 0.f;
      for (int64_t k = 0; k < head_size_; ++k) {
        const float x = token < first ? 0.f : static_cast<float>(in[k]);
        square += x * x;
        out[packed_index<M>(k, token % kColumns, kColumns)] = static_cast<M>(x);
      }
      inverse_norms_[token] = token < first ? 0.f : 1.f / std::max(std::sqrt(square), 1e-12f);
    }
  }

  // Sums of a tile's rows, from the last panel to the first: what is alike first is the latest.
  void sum_rows(int64_t head, int64_t tile, Rows<T, M>& rows, float* products, float* partial, float* sums) {
    const int64_t start = tiles_.start(tile), first = tiles_.first_new(tile);
    rows.point_at(row(head, start), key_.stride(1), tiles_.size);
    std::fill_n(partial, tiles_.size * kLanes, 0.f);
    std::fill_n(&latest_[start + first], tiles_.size - first, int64_t{-1});
    for (int64_t panel = num_panels_ - 1; panel >= 0; --panel) {
      multiply(tiles_.size, kColumns, head_size_, rows.data, rows.stride,
               packed_.data() + panel * kColumns * head_size_, kColumns, products);
      for (int64_t i = first; i < tiles_.size; ++i)
        add_row(start + i, panel * kColumns, products + i * kColumns, partial + i * kLanes);
    }
    for (int64_t i = first; i < tiles_.size; ++i)
      sums[start + i] = sum_lanes(Vec::loadu(partial + i * kLanes)) * inverse_norms_[start + i];
  }

  // A key's products with a panel of keys, which starts at `begin`.
  void add_row(int64_t token, int64_t begin, float* products, float* partial) {
    if (token >= begin && token < begin + kColumns) products[token - begin] = 0.f;
    const Vec own(inverse_norms_[token]), threshold(threshold_);
    Vec sum = Vec::loadu(partial);
    for (int64_t c = kColumns - kLanes; c >= 0; c -= kLanes) {
      const Vec scaled = Vec::loadu(products + c) * Vec::loadu(&inverse_norms_[begin + c]);
      sum = sum + scaled;
      if (latest_[token] < 0) find_latest(token, begin + c, scaled * own, threshold);
    }
    sum.store(partial);
  }

  void find_latest(int64_t token, int64_t begin, const Vec& cosines, const Vec& threshold) {
    const int64_t count = std::clamp(num_tokens_ - begin, int64_t{0}, kLanes);  // the rest is padding
    const uint32_t alike = ~(cosines > threshold).zero_mask() & ((1u << count) - 1);
    if (!alike) return;
    const int lane = 31 - __builtin_clz(alike);
    float values[kLanes];
    cosines.store(values);
    latest_[token] = begin + lane, cosines_[token] = values[lane];
  }

  const T* row(int64_t head, int64_t token) const {
    return key_.const_data_ptr<T>() + head * key_.stride(0) + token * key_.stride(1);
  }

  const Tensor& key_;
  const int64_t* const num_absent_;
  const float threshold_;
  const int64_t num_tokens_, head_size_, num_panels_;
  const Tiles tiles_;
  std::vector<M> packed_;
  std::vector<float> inverse_norms_;  // of padding 0
  std::vector<int64_t> latest_;       // by key: the latest one that is like it, or -1
  std::vector<float> cosines_;        // with that one
};

}  // namespace kvselect

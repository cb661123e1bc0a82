// What stands for segments of queries and blocks of keys, and how critical these are for those:
// prefilling/criticality.py, in one pass over each.
#pragma once

#include <limits>

#include "tiles.h"

namespace kvselect {

// The largest and the smallest of `count` rows, element by element.
template <typename T>
void extremes_of(const T* rows, int64_t stride, int64_t count, int64_t size, T* largest, T* smallest) {
  using Lanes = at::vec::Vectorized<T>;
  for (int64_t i = 0; i < size; i += Lanes::size()) {
    const int64_t n = std::min<int64_t>(Lanes::size(), size - i);
    Lanes high = Lanes::loadu(rows + i, n), low = high;
    for (int64_t row = 1; row < count; ++row) {
      const Lanes next = Lanes::loadu(rows + row * stride + i, n);
      high = at::vec::maximum(high, next), low = at::vec::minimum(low, next);
    }
    high.store(largest + i, n), low.store(smallest + i, n);
  }
}

// vectors [num_heads, num_tokens, head_size] -> extremes [2, num_heads, num_groups, head_size].
template <typename T>
void write_extremes(const Tensor& vectors, int64_t size, Tensor& extremes) {
  const int64_t num_heads = vectors.size(0), num_groups = extremes.size(2), head_size = vectors.size(2);
  const T* in = vectors.const_data_ptr<T>();
  T* out = extremes.mutable_data_ptr<T>();
  at::parallel_for(0, num_heads * num_groups, divide_up(2048, size), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* first = in + i / num_groups * vectors.stride(0) + i % num_groups * size * vectors.stride(1);
      T *largest = out + i * head_size, *smallest = largest + extremes.stride(0);
      extremes_of(first, vectors.stride(1), size, head_size, largest, smallest);
    }
  });
}

template <typename T>
struct Criticality {
  // [num_kv_heads, group, num_segments, head_size] float; twice [num_kv_heads, num_blocks, head_size];
  // [num_segments] long.
  const Tensor &middle, &largest, &smallest, &num_before;

  // The mean over the group of the larger product, times `scale`, into [num_segments, num_kv_heads, num_blocks].
  void multiply(double scale, Tensor& logits) const {
    const int64_t num_kv_heads = largest.size(0), num_blocks = largest.size(1);
    const int64_t group = middle.size(1), num_segments = middle.size(2);
    const int64_t* before = num_before.const_data_ptr<int64_t>();
    float* out = logits.mutable_data_ptr<float>();
    at::parallel_for(0, num_kv_heads * num_blocks, 64, [&](int64_t begin, int64_t end) {
      Rows<T, float> high(1, head_size()), low(1, head_size());
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i / num_blocks, block = i % num_blocks;
        high.point_at(row_of(largest, head, block), 0, 1);
        low.point_at(row_of(smallest, head, block), 0, 1);
        for (int64_t segment = 0; segment < num_segments; ++segment) {
          if (block >= before[segment]) continue;
          float sum = 0;
          for (int64_t member = 0; member < group; ++member)
            sum += larger_product(query(head, member, segment), high.data, low.data);
          out[(segment * num_kv_heads + head) * num_blocks + block] = sum / group * scale;
        }
      }
    });
  }

 private:
  int64_t head_size() const { return largest.size(2); }

  static const T* row_of(const Tensor& extremes, int64_t head, int64_t block) {
    return extremes.const_data_ptr<T>() + head * extremes.stride(0) + block * extremes.stride(1);
  }

  const float* query(int64_t head, int64_t member, int64_t segment) const {
    return middle.const_data_ptr<float>() +
           ((head * middle.size(1) + member) * middle.size(2) + segment) * head_size();
  }

  float larger_product(const float* query, const float* high, const float* low) const {
    Vec with_high(0.f), with_low(0.f);
    for_lanes(0, head_size(), [&](int64_t i, auto n) {
      const Vec x = load(query + i, n);
      with_high = at::vec::fmadd(x, load(high + i, n), with_high);
      with_low = at::vec::fmadd(x, load(low + i, n), with_low);
    });
    return std::max(sum_lanes(with_high), sum_lanes(with_low));
  }
};

}  // namespace kvselect

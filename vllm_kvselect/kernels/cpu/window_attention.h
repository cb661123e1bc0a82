// Window attention, averaged over the queries: scoring/snapkv.py. Every key is multiplied twice
// instead of keeping [num_kv_heads, group * window, num_tokens] weights.
#pragma once

#include <cmath>
#include <cstring>

#include "tiles.h"

namespace kvselect {

// 2^x, relative error below 2e-7, for x below 128; everything under 2^-126 is that. It has half the
// work of a library's exp, and exponentials are most of this kernel.
inline Vec exp2(Vec x) {
  using Bits = at::vec::Vectorized<int32_t>;
  const Vec round(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  x = at::vec::clamp_min(x, Vec(-126.f));
  const Vec shifted = x + round, r = x - (shifted - round);
  // Least maximal relative error on [-0.5, 0.5].
  Vec p(1.327645150013268e-3f);
  for (const float coefficient : {9.675540961325169e-3f, 5.550713464617729e-2f,
                                  2.402212023735046e-1f, 6.931469440460205e-1f, 1.f})
    p = at::vec::fmadd(p, r, Vec(coefficient));
  const Bits exponent = at::vec::cast<int32_t>(shifted) << Bits(23);
  return at::vec::cast<float>(at::vec::cast<int32_t>(p) + exponent);
}

template <typename T>
class WindowAttention {
 public:
  WindowAttention(const Tensor& query, const Tensor& key, double scale)
      : query_(query), key_(key), window_(query.size(0)), num_kv_heads_(key.size(0)),
        num_tokens_(key.size(1)), head_size_(key.size(2)),
        num_rows_(query.size(1) / num_kv_heads_ * window_),
        padded_rows_(divide_up(num_rows_, kLanes) * kLanes),
        scale_(static_cast<float>(scale * M_LOG2E)),
        tiles_(num_tokens_, 64), packed_(num_kv_heads_ * head_size_ * padded_rows_, T(0)) {
    pack_queries();
  }

  // [num_kv_heads, num_tokens - window] float
  Tensor mean() {
    const std::vector<float> normalizers = log_denominators();
    const Vec scale(scale_);
    const int64_t num_scored = num_tokens_ - window_;
    Tensor scores = at::empty({num_kv_heads_, num_scored}, key_.options().dtype(at::kFloat));
    float* out = scores.mutable_data_ptr<float>();
    parallel_tiles<T>(num_kv_heads_ * tiles_.count, [&] {
      return [&, logits = std::vector<float>(tiles_.size * padded_rows_)](int64_t i) mutable {
        const int64_t head = i / tiles_.count, tile = i % tiles_.count, start = tiles_.start(tile);
        const int64_t last = std::min(tiles_.size, num_scored - start);
        if (tiles_.first_new(tile) >= last) return;
        compute_logits(head, tile, logits.data());
        for (int64_t t = tiles_.first_new(tile); t < last; ++t) {
          Vec sum(0.f);
          for (int64_t r = 0; r < padded_rows_; r += kLanes) {
            const Vec logit = Vec::loadu(&logits[t * padded_rows_ + r]);
            const Vec normalizer = Vec::loadu(&normalizers[head * padded_rows_ + r]);
            sum = sum + exp2(at::vec::fmsub(logit, scale, normalizer));
          }
          out[head * num_scored + start + t] = sum_lanes(sum) / num_rows_;
        }
      };
    });
    return scores;
  }

 private:
  static constexpr float kMasked = -1e30f;

  // Row `j * window + i` of a KV head is query i of the head's j-th query head.
  void pack_queries() {
    const int64_t group = query_.size(1) / num_kv_heads_;
    for (int64_t h = 0; h < query_.size(1); ++h)
      for (int64_t i = 0; i < window_; ++i) {
        const T* in = query_.const_data_ptr<T>() + i * query_.stride(0) + h * query_.stride(1);
        T* out = packed_.data() + h / group * head_size_ * padded_rows_;
        for (int64_t k = 0; k < head_size_; ++k)
          out[packed_index<T>(k, h % group * window_ + i, padded_rows_)] = in[k];
      }
  }

  // A tile's logits before scaling, [tile, padded_rows]; those of later tokens are masked.
  void compute_logits(int64_t head, int64_t tile, float* logits) const {
    const int64_t start = tiles_.start(tile), window_start = num_tokens_ - window_;
    const T* keys = key_.const_data_ptr<T>() + head * key_.stride(0) + start * key_.stride(1);
    multiply(tiles_.size, padded_rows_, head_size_, keys, key_.stride(1),
             packed_.data() + head * head_size_ * padded_rows_, padded_rows_, logits);
    for (int64_t token = std::max(start, window_start); token < start + tiles_.size; ++token)
      for (int64_t row = 0; row < num_rows_; row += window_)
        std::fill_n(logits + (token - start) * padded_rows_ + row, token - window_start, kMasked);
  }

  // Binary logarithm of every row's softmax denominator, [num_kv_heads, padded_rows].
  std::vector<float> log_denominators() const {
    const Vec scale(scale_);
    const int64_t count = num_kv_heads_ * tiles_.count;
    std::vector<float> maxima(count * padded_rows_, kMasked), sums(count * padded_rows_, 0.f);
    parallel_tiles<T>(count, [&] {
      return [&, logits = std::vector<float>(tiles_.size * padded_rows_)](int64_t i) mutable {
        const int64_t tile = i % tiles_.count;
        compute_logits(i / tiles_.count, tile, logits.data());
        for (int64_t r = 0; r < padded_rows_; r += kLanes) {
          Vec maximum(kMasked), sum(0.f);
          for (int64_t t = tiles_.first_new(tile); t < tiles_.size; ++t)
            maximum = at::vec::clamp_min(maximum, Vec::loadu(&logits[t * padded_rows_ + r]));
          for (int64_t t = tiles_.first_new(tile); t < tiles_.size; ++t)
            sum = sum + exp2((Vec::loadu(&logits[t * padded_rows_ + r]) - maximum) * scale);
          maximum.store(&maxima[i * padded_rows_ + r]);
          sum.store(&sums[i * padded_rows_ + r]);
        }
      };
    });
    std::vector<float> normalizers(num_kv_heads_ * padded_rows_);
    for (int64_t head = 0; head < num_kv_heads_; ++head) {
      float* normalizer = &normalizers[head * padded_rows_];
      const int64_t begin = head * tiles_.count, end = begin + tiles_.count;
      for (int64_t r = 0; r < padded_rows_; r += kLanes) {
        Vec maximum(kMasked), sum(0.f);
        for (int64_t i = begin; i < end; ++i)
          maximum = at::vec::clamp_min(maximum, Vec::loadu(&maxima[i * padded_rows_ + r]));
        for (int64_t i = begin; i < end; ++i) {
          const Vec difference = Vec::loadu(&maxima[i * padded_rows_ + r]) - maximum;
          sum = at::vec::fmadd(Vec::loadu(&sums[i * padded_rows_ + r]), exp2(difference * scale), sum);
        }
        at::vec::fmadd(maximum, scale, sum.log2()).store(normalizer + r);
      }
      // Rows of padding weigh nothing.
      std::fill(normalizer + num_rows_, normalizer + padded_rows_, -kMasked);
    }
    return normalizers;
  }

  const Tensor& query_;
  const Tensor& key_;
  const int64_t window_, num_kv_heads_, num_tokens_, head_size_, num_rows_, padded_rows_;
  const float scale_;
  const Tiles tiles_;
  std::vector<T> packed_;
};

}  // namespace kvselect

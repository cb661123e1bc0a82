// Window attention, its mean or its maximum over the queries: scoring/snapkv.py and
// scoring/defensivekv.py. Weights are computed relative to their
// tile's maximum; a KV head's first ones are kept, [num_tokens, rows] float, until the whole row's
// denominator is known, as many as a core's cache holds. The rest are computed again.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>

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

template <typename T, typename M>
class WindowAttention {
 public:
  // Tokens before `num_absent` [num_kv_heads] are in no head.
  WindowAttention(const Tensor& query, const Tensor& key, double scale, const std::optional<Tensor>& sinks,
                  const std::optional<Tensor>& num_absent)
      : query_(query), key_(key), num_absent_(num_absent ? num_absent->const_data_ptr<int64_t>() : nullptr),
        window_(query.size(0)), num_kv_heads_(key.size(0)),
        num_tokens_(key.size(1)), head_size_(key.size(2)),
        num_rows_(query.size(1) / num_kv_heads_ * window_),
        padded_rows_(divide_up(num_rows_, kLanes) * kLanes),
        scale_(static_cast<float>(scale * M_LOG2E)),
        tiles_(num_tokens_, 64), packed_(num_kv_heads_ * head_size_ * padded_rows_, M(0)),
        maxima_(tiles_.count * padded_rows_), sums_(tiles_.count * padded_rows_),
        num_kept_(std::min(tiles_.count, kMostKept / (tiles_.size * padded_rows_))),
        kept_(new float[num_kept_ * tiles_.size * padded_rows_]),
        sinks_(num_kv_heads_ * padded_rows_, kMasked) {
    pack_queries();
    if (sinks) spread(sinks->const_data_ptr<float>(), scale);
  }

  // The mean over the rows, or the maximum, [num_kv_heads, num_tokens - window] float.
  Tensor over_rows(bool largest) {
    Tensor scores = at::empty({num_kv_heads_, num_tokens_ - window_}, key_.options().dtype(at::kFloat));
    for (int64_t head = 0; head < num_kv_heads_; ++head) {
      compute_weights(head);
      normalize(&sinks_[head * padded_rows_]);
      float* out = scores.mutable_data_ptr<float>() + head * (num_tokens_ - window_);
      if (largest) reduce<true>(head, out);
      else reduce<false>(head, out);
    }
    return scores;
  }

 private:
  static constexpr float kMasked = -1e30f;
  static constexpr int64_t kMostKept = 1 << 18;  // floats: half of a second-level cache

  // Row `j * window + i` of a KV head is query i of the head's j-th query head.
  void pack_queries() {
    const int64_t group = query_.size(1) / num_kv_heads_;
    for (int64_t h = 0; h < query_.size(1); ++h)
      for (int64_t i = 0; i < window_; ++i) {
        const T* in = query_.const_data_ptr<T>() + i * query_.stride(0) + h * query_.stride(1);
        M* out = packed_.data() + h / group * head_size_ * padded_rows_;
        for (int64_t k = 0; k < head_size_; ++k)
          out[packed_index<M>(k, h % group * window_ + i, padded_rows_)] = static_cast<M>(in[k]);
      }
  }

  // A tile's logits before scaling, [tile, padded_rows]; those of later and of absent tokens are masked.
  void compute_logits(int64_t head, int64_t tile, Rows<T, M>& keys, float* logits) const {
    const int64_t start = tiles_.start(tile), window_start = num_tokens_ - window_;
    keys.point_at(key_.const_data_ptr<T>() + head * key_.stride(0) + start * key_.stride(1),
                  key_.stride(1), tiles_.size);
    multiply(tiles_.size, padded_rows_, head_size_, keys.data, keys.stride,
             packed_.data() + head * head_size_ * padded_rows_, padded_rows_, logits);
    if (num_absent_) {
      const int64_t num_masked = std::clamp(num_absent_[head] - start, int64_t{0}, tiles_.size);
      std::fill_n(logits, num_masked * padded_rows_, kMasked);
    }
    for (int64_t token = std::max(start, window_start); token < start + tiles_.size; ++token)
      for (int64_t row = 0; row < num_rows_; row += window_)
        std::fill_n(logits + (token - start) * padded_rows_ + row, token - window_start, kMasked);
  }

  // The maxima of all tiles, and the sums of the weights relative to them.
  void compute_weights(int64_t head) {
    parallel_tiles<M>(tiles_.count, [&] {
      return [&, keys = tile_keys(), logits = tile_buffer(), other = tile_buffer()](int64_t tile) mutable {
        float* weights = tile < num_kept_ ? &kept_[tile * tiles_.size * padded_rows_] : other.data();
        compute_tile(head, tile, keys, logits.data(), weights);
      };
    });
  }

  void compute_tile(int64_t head, int64_t tile, Rows<T, M>& keys, float* logits, float* weights) {
    compute_logits(head, tile, keys, logits);
    const Vec scale(scale_);
    const int64_t first = tiles_.first_new(tile);
    for (int64_t r = 0; r < padded_rows_; r += kLanes) {
      Vec maximum(kMasked), sum(0.f);
      for (int64_t t = first; t < tiles_.size; ++t)
        maximum = at::vec::clamp_min(maximum, Vec::loadu(&logits[t * padded_rows_ + r]));
      for (int64_t t = first; t < tiles_.size; ++t) {
        const Vec weight = exp2((Vec::loadu(&logits[t * padded_rows_ + r]) - maximum) * scale);
        weight.store(weights + (t - first) * padded_rows_ + r);
        sum = sum + weight;
      }
      maximum.store(&maxima_[tile * padded_rows_ + r]);
      sum.store(&sums_[tile * padded_rows_ + r]);
    }
  }

  // A sink is a logit that all rows of its query head have besides those of the keys.
  void spread(const float* sinks, double scale) {
    for (int64_t head = 0; head < num_kv_heads_; ++head)
      for (int64_t row = 0; row < num_rows_; ++row)
        sinks_[head * padded_rows_ + row] = static_cast<float>(sinks[(head * num_rows_ + row) / window_] / scale);
  }

  // Turns every tile's sums into the factors that its weights lack, the mean's included.
  void normalize(const float* sinks) {
    const Vec scale(scale_), num_rows(static_cast<float>(num_rows_));
    for (int64_t r = 0; r < padded_rows_; r += kLanes) {
      const Vec sink = Vec::loadu(&sinks[r]);
      Vec maximum = sink;
      for (int64_t i = r; i < tiles_.count * padded_rows_; i += padded_rows_)
        maximum = at::vec::clamp_min(maximum, Vec::loadu(&maxima_[i]));
      Vec sum = exp2((sink - maximum) * scale);
      for (int64_t i = r; i < tiles_.count * padded_rows_; i += padded_rows_) {
        const Vec factor = exp2((Vec::loadu(&maxima_[i]) - maximum) * scale);
        sum = at::vec::fmadd(Vec::loadu(&sums_[i]), factor, sum);
        factor.store(&sums_[i]);
      }
      const Vec normalizer = sum * num_rows;
      for (int64_t i = r; i < tiles_.count * padded_rows_; i += padded_rows_)
        (Vec::loadu(&sums_[i]) / normalizer).store(&sums_[i]);
    }
    // Rows of padding weigh nothing.
    for (int64_t tile = 0; tile < tiles_.count; ++tile)
      std::fill_n(&sums_[tile * padded_rows_ + num_rows_], padded_rows_ - num_rows_, 0.f);
  }

  template <bool kLargest>
  void reduce(int64_t head, float* scores) {
    const int64_t num_scored = num_tokens_ - window_;
    parallel_tiles<M>(tiles_.count, [&] {
      return [&, keys = tile_keys(), logits = tile_buffer(), other = tile_buffer()](int64_t tile) mutable {
        const std::vector<float> factors(&sums_[tile * padded_rows_], &sums_[(tile + 1) * padded_rows_]);
        if (tile >= num_kept_) compute_tile(head, tile, keys, logits.data(), other.data());
        const float* weights = tile < num_kept_ ? &kept_[tile * tiles_.size * padded_rows_] : other.data();
        const int64_t last = std::min((tile + 1) * tiles_.size, num_scored);
        for (int64_t token = tile * tiles_.size; token < last; ++token, weights += padded_rows_) {
          Vec result(0.f);
          for (int64_t r = 0; r < padded_rows_; r += kLanes) {
            const Vec weight = Vec::loadu(weights + r), factor = Vec::loadu(&factors[r]);
            if constexpr (kLargest) result = at::vec::maximum(result, weight * factor);
            else result = at::vec::fmadd(weight, factor, result);
          }
          // The factors are those of a mean.
          scores[token] = kLargest ? largest_lane(result) * num_rows_ : sum_lanes(result);
        }
      };
    });
  }

  Rows<T, M> tile_keys() const { return {tiles_.size, head_size_}; }
  std::vector<float> tile_buffer() const { return std::vector<float>(tiles_.size * padded_rows_); }

  const Tensor& query_;
  const Tensor& key_;
  const int64_t* const num_absent_;
  const int64_t window_, num_kv_heads_, num_tokens_, head_size_, num_rows_, padded_rows_;
  const float scale_;
  const Tiles tiles_;
  std::vector<M> packed_;
  std::vector<float> maxima_, sums_;
  const int64_t num_kept_;         // tiles whose weights are kept
  std::unique_ptr<float[]> kept_;  // a vector would be zeroed first
  std::vector<float> sinks_;       // of all rows, before scaling; masked where there are none
};

// What is no number is larger than all numbers, as in PyTorch's pooling.
inline float larger(float a, float b) { return b > a || b != b ? b : a; }

// The maximum over `kernel_size` (odd) neighbouring tokens of every row, [num_kv_heads, num_tokens].
inline Tensor max_pool(const Tensor& scores, int64_t kernel_size) {
  if (kernel_size == 1) return scores;
  const int64_t num_tokens = scores.size(1), reach = kernel_size / 2;
  Tensor pooled = scores.clone();
  for (int64_t head = 0; head < scores.size(0); ++head) {
    const float* in = scores.const_data_ptr<float>() + head * num_tokens;
    float* __restrict out = pooled.mutable_data_ptr<float>() + head * num_tokens;
    for (int64_t shift = 1; shift <= reach; ++shift) {
      for (int64_t t = shift; t < num_tokens; ++t) out[t] = larger(out[t], in[t - shift]);
      for (int64_t t = 0; t < num_tokens - shift; ++t) out[t] = larger(out[t], in[t + shift]);
    }
  }
  return pooled;
}

}  // namespace kvselect

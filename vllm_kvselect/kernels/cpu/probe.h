// What a linear probe says of tokens: scoring/probe.py, in one pass over queries, keys and values.
//
// No vector is turned back. A pair (x, y) that was turned by an angle with cosine c and sine s is, before
// that, (c x + s y, c y - s x); under weights (u, v) it counts
//   c (u x + v y) + s (u y - v x),
// and both sums are taken over all vectors of a token first.
#pragma once

#include <cmath>

#include "tiles.h"

namespace kvselect {

template <typename T>
struct Probe {
  // [num_tokens, num_heads, head_size] and twice [num_kv_heads, num_tokens, head_size];
  // [num_kv_heads, num_features]; [num_tokens, num_pairs].
  const Tensor &query, &key, &value, &weights, &cos, &sin;

  void score(int64_t first_position, double per_token, Tensor& scores) const {
    const int64_t num_tokens = key.size(1), num_kv_heads = key.size(0), num_pairs = cos.size(1);
    float* out = scores.mutable_data_ptr<float>();
    at::parallel_for(0, num_tokens, 16, [&](int64_t begin, int64_t end) {
      Rows<T, float> rows(group() + 2, head_size());
      std::vector<float> turn(2 * num_pairs);
      for (int64_t token = begin; token < end; ++token) {
        read_turn(token, turn.data());
        for (int64_t head = 0; head < num_kv_heads; ++head) {
          const double logarithm = product(head, token, turn.data(), rows);
          out[head * num_tokens + token] = std::exp(logarithm + per_token * (first_position + token));
        }
      }
    });
  }

 private:
  int64_t group() const { return query.size(1) / key.size(0); }
  int64_t head_size() const { return key.size(2); }

  // Cosines and sines by which a token's pairs are turned back. Some models stretch them as well.
  void read_turn(int64_t token, float* turn) const {
    const int64_t num_pairs = cos.size(1);
    const float* c = cos.const_data_ptr<float>() + token * cos.stride(0);
    const float* s = sin.const_data_ptr<float>() + token * sin.stride(0);
    for (int64_t i = 0; i < num_pairs; ++i) {
      const float stretch = c[i] * c[i] + s[i] * s[i];
      turn[i] = c[i] / stretch, turn[num_pairs + i] = s[i] / stretch;
    }
  }

  // The head's weights times what the token's queries and key were before their rotation, and its value.
  float product(int64_t head, int64_t token, const float* turn, Rows<T, float>& rows) const {
    const int64_t size = head_size(), num_pairs = cos.size(1);
    const float* weight = weights.const_data_ptr<float>() + head * weights.size(1);
    const T* queries = query.const_data_ptr<T>() + token * query.stride(0) + head * group() * query.stride(1);
    Vec sum(0.f);
    rows.point_at(queries, query.stride(1), group());
    add_turned(rows, group(), weight, turn, sum);
    rows.point_at(key.const_data_ptr<T>() + head * key.stride(0) + token * key.stride(1), 0, 1);
    add_turned(rows, 1, weight + group() * size, turn, sum);
    rows.point_at(value.const_data_ptr<T>() + head * value.stride(0) + token * value.stride(1), 0, 1);
    add_rest(rows.data, 0, weight + (group() + 1) * size, sum);
    return sum_lanes(sum) + weight[(group() + 2) * size];
  }

  void add_turned(const Rows<T, float>& rows, int64_t count, const float* weight, const float* turn,
                  Vec& sum) const {
    const int64_t size = head_size(), num_pairs = cos.size(1);
    for_lanes(0, num_pairs, [&](int64_t i, int64_t n) {
      Vec along(0.f), across(0.f);
      for (int64_t row = 0; row < count; ++row) {
        const float *at = rows.data + row * rows.stride + i, *w = weight + row * size + i;
        const Vec x = load(at, n), y = load(at + num_pairs, n), u = load(w, n), v = load(w + num_pairs, n);
        along = at::vec::fmadd(u, x, at::vec::fmadd(v, y, along));
        across = at::vec::fmadd(u, y, across) - v * x;
      }
      sum = at::vec::fmadd(load(turn + i, n), along, sum);
      sum = at::vec::fmadd(load(turn + num_pairs + i, n), across, sum);
    });
    for (int64_t row = 0; row < count; ++row)
      add_rest(rows.data + row * rows.stride, 2 * num_pairs, weight + row * size, sum);
  }

  // Channels from `begin` on, which are not rotated.
  void add_rest(const float* row, int64_t begin, const float* weight, Vec& sum) const {
    for_lanes(begin, head_size(), [&](int64_t i, int64_t n) {
      sum = at::vec::fmadd(load(row + i, n), load(weight + i, n), sum);
    });
  }
};

}  // namespace kvselect

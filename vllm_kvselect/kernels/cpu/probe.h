// What a linear probe says of tokens: scoring/probe.py, in one pass over keys and values.
//
// No key is turned back. A pair (x, y) that was turned by an angle with cosine c and sine s is, before
// that, (c x + s y, c y - s x); under weights (u, v) it counts
//   c (u x + v y) + s (u y - v x),
// so that cosines and sines are read once for all heads of a token.
#pragma once

#include "tiles.h"

namespace kvselect {

template <typename T>
struct Probe {
  // Twice [num_kv_heads, num_tokens, head_size]; [num_kv_heads, num_features]; [num_tokens, num_pairs].
  const Tensor &key, &value, &weights, &cos, &sin;
  // Asked for once: for every token that would take as long as its products.
  const T* const keys = key.const_data_ptr<T>();
  const T* const values = value.const_data_ptr<T>();
  const float* const first_weights = weights.const_data_ptr<float>();
  const at::IntArrayRef key_strides = key.strides(), value_strides = value.strides();
  const int64_t num_kv_heads = key.size(0), num_tokens = key.size(1), head_size = key.size(2);
  const int64_t num_pairs = cos.size(1), num_features = weights.size(1);

  void score(int64_t first_position, double per_token, Tensor& scores) const {
    float* out = scores.mutable_data_ptr<float>();
    at::parallel_for(0, num_tokens, 16, [&](int64_t begin, int64_t end) {
      Rows<T, float> row(1, head_size);
      std::vector<float> turn(2 * num_pairs);
      for (int64_t token = begin; token < end; ++token) {
        read_turn(token, turn.data());
        const float shift = static_cast<float>(per_token * (first_position + token));
        for (int64_t head = 0; head < num_kv_heads; ++head)
          out[head * num_tokens + token] = product(head, token, turn.data(), row) + shift;
      }
      for (int64_t head = 0; head < num_kv_heads; ++head)
        for_lanes(begin, end, [&, row = out + head * num_tokens](int64_t i, auto n) {
          load(row + i, n).exp().store(row + i, n);
        });
    });
  }

 private:
  // Cosines and sines by which a token's pairs are turned back. Some models stretch them as well.
  void read_turn(int64_t token, float* turn) const {
    const float* c = cos.const_data_ptr<float>() + token * cos.stride(0);
    const float* s = sin.const_data_ptr<float>() + token * sin.stride(0);
    for_lanes(0, num_pairs, [&](int64_t i, auto n) {
      const Vec cosine = load(c + i, n), sine = load(s + i, n);
      const Vec inverse = Vec(1.f) / (cosine * cosine + sine * sine);
      (cosine * inverse).store(turn + i, n), (sine * inverse).store(turn + num_pairs + i, n);
    });
  }

  // The head's weights times what the token's key was before its rotation, and its value.
  float product(int64_t head, int64_t token, const float* turn, Rows<T, float>& row) const {
    const float* weight = first_weights + head * num_features;
    Vec sum(0.f), across(0.f);  // two sums do not wait for each other
    row.point_at(keys + head * key_strides[0] + token * key_strides[1], 0, 1);
    for_lanes(0, num_pairs, [&](int64_t i, auto n) {
      const Vec x = load(row.data + i, n), y = load(row.data + num_pairs + i, n);
      const Vec u = load(weight + i, n), v = load(weight + num_pairs + i, n);
      sum = at::vec::fmadd(load(turn + i, n), at::vec::fmadd(u, x, v * y), sum);
      across = at::vec::fmadd(load(turn + num_pairs + i, n), u * y - v * x, across);
    });
    add_rest(row.data, 2 * num_pairs, weight, sum);
    row.point_at(values + head * value_strides[0] + token * value_strides[1], 0, 1);
    add_rest(row.data, 0, weight + head_size, sum);
    return sum_lanes(sum + across) + weight[2 * head_size];
  }

  // Channels from `begin` on, which are not rotated.
  void add_rest(const float* row, int64_t begin, const float* weight, Vec& sum) const {
    for_lanes(begin, head_size, [&](int64_t i, auto n) {
      sum = at::vec::fmadd(load(row + i, n), load(weight + i, n), sum);
    });
  }
};

}  // namespace kvselect

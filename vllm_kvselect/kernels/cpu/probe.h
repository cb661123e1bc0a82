// What a linear probe says of tokens: scoring/probe.py, in one pass over queries, keys and values.
//
// No vector is turned back. A pair (x, y) that was turned by an angle with cosine c and sine s is, before
// that, (c x + s y, c y - s x); under weights (u, v) it counts
//   c (u x + v y) + s (u y - v x),
// and both sums are taken over all vectors of a token first.
#pragma once

#include "tiles.h"

namespace kvselect {

template <typename T>
struct Probe {
  // [num_tokens, num_heads, head_size] and twice [num_kv_heads, num_tokens, head_size];
  // [num_kv_heads, num_features]; [num_tokens, num_pairs].
  const Tensor &query, &key, &value, &weights, &cos, &sin;
  // Asked for once: for every token that would take as long as its products.
  const T* const queries = query.const_data_ptr<T>();
  const T* const keys = key.const_data_ptr<T>();
  const T* const values = value.const_data_ptr<T>();
  const float* const first_weights = weights.const_data_ptr<float>();
  const at::IntArrayRef query_strides = query.strides(), key_strides = key.strides(), value_strides = value.strides();
  const int64_t num_kv_heads = key.size(0), num_tokens = key.size(1), head_size = key.size(2);
  const int64_t group = query.size(1) / num_kv_heads, num_pairs = cos.size(1), num_features = weights.size(1);

  void score(int64_t first_position, double per_token, Tensor& scores) const {
    float* out = scores.mutable_data_ptr<float>();
    at::parallel_for(0, num_tokens, 16, [&](int64_t begin, int64_t end) {
      Rows<T, float> rows(group + 2, head_size);
      std::vector<float> turn(2 * num_pairs);
      for (int64_t token = begin; token < end; ++token) {
        read_turn(token, turn.data());
        const float shift = static_cast<float>(per_token * (first_position + token));
        for (int64_t head = 0; head < num_kv_heads; ++head)
          out[head * num_tokens + token] = product(head, token, turn.data(), rows) + shift;
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

  // The head's weights times what the token's queries and key were before their rotation, and its value.
  float product(int64_t head, int64_t token, const float* turn, Rows<T, float>& rows) const {
    const float* weight = first_weights + head * num_features;
    Vec sum(0.f);
    rows.point_at(queries + token * query_strides[0] + head * group * query_strides[1], query_strides[1], group);
    add_turned(rows, group, weight, turn, sum);
    rows.point_at(keys + head * key_strides[0] + token * key_strides[1], 0, 1);
    add_turned(rows, 1, weight + group * head_size, turn, sum);
    rows.point_at(values + head * value_strides[0] + token * value_strides[1], 0, 1);
    add_rest(rows.data, 0, weight + (group + 1) * head_size, sum);
    return sum_lanes(sum) + weight[(group + 2) * head_size];
  }

  void add_turned(const Rows<T, float>& rows, int64_t count, const float* weight, const float* turn,
                  Vec& sum) const {
    for_lanes(0, num_pairs, [&](int64_t i, auto n) {
      Vec ux(0.f), vy(0.f), uy(0.f), vx(0.f);  // four sums do not wait for each other
      for (int64_t row = 0; row < count; ++row) {
        const float *at = rows.data + row * rows.stride + i, *w = weight + row * head_size + i;
        const Vec x = load(at, n), y = load(at + num_pairs, n), u = load(w, n), v = load(w + num_pairs, n);
        ux = at::vec::fmadd(u, x, ux), vy = at::vec::fmadd(v, y, vy);
        uy = at::vec::fmadd(u, y, uy), vx = at::vec::fmadd(v, x, vx);
      }
      sum = at::vec::fmadd(load(turn + i, n), ux + vy, sum);
      sum = at::vec::fmadd(load(turn + num_pairs + i, n), uy - vx, sum);
    });
    for (int64_t row = 0; row < count; ++row)
      add_rest(rows.data + row * rows.stride, 2 * num_pairs, weight + row * head_size, sum);
  }

  // Channels from `begin` on, which are not rotated.
  void add_rest(const float* row, int64_t begin, const float* weight, Vec& sum) const {
    for_lanes(begin, head_size, [&](int64_t i, auto n) {
      sum = at::vec::fmadd(load(row + i, n), load(weight + i, n), sum);
    });
  }
};

}  // namespace kvselect

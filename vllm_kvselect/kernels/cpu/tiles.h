// Tiles of matrix products. brgemm (oneDNN's, through torch) uses the machine's own matrix unit, and
// generates code for every shape: so all tiles of a product have one shape.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvselect {

using at::Tensor;
using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline float sum_lanes(const Vec& vec) {
  return at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, vec);
}

// The right operand of brgemm, [depth, columns]: elements narrower than float stand in pairs of
// neighbours along the depth, [depth / 2, columns, 2].
template <typename T>
constexpr int64_t kPair = std::is_same_v<T, float> ? 1 : 2;

// Where an element of a row of `columns` elements stands in a packed right operand.
template <typename T>
int64_t packed_index(int64_t depth, int64_t column, int64_t columns) {
  return (depth / kPair<T> * columns + column) * kPair<T> + depth % kPair<T>;
}

template <typename T>
void pack(const T* in, int64_t row_stride, int64_t depth, int64_t columns, T* out) {
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t n = 0; n < columns; ++n)
      out[packed_index<T>(k, n, columns)] = in[k * row_stride + n];
}

// c [m, n] = a [m, k] * b [k, n], of which b is packed in rows of ldb elements.
template <typename T>
void multiply(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb,
              float* c) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, n, false, a, b, c, kPair<T> == 2);
}

inline void widen(const float* in, int64_t size, float* out) { std::copy_n(in, size, out); }

inline void widen(const at::BFloat16* in, int64_t size, float* out) {
  const auto* narrow = reinterpret_cast<const uint16_t*>(in);
  auto* wide = reinterpret_cast<uint32_t*>(out);
  for (int64_t i = 0; i < size; ++i) wide[i] = static_cast<uint32_t>(narrow[i]) << 16;
}

// Runs `body(i)` for all i below `count`, in parallel; `make_body` gives each thread its own.
template <typename T, typename MakeBody>
void parallel_tiles(int64_t count, const MakeBody& make_body) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    auto body = make_body();
    for (int64_t i = begin; i < end; ++i) body(i);
    at::native::cpublas::brgemm_release(kPair<T> == 2);
  });
}

// A range cut into tiles of one size; the last is moved back to end with the range.
struct Tiles {
  Tiles(int64_t length, int64_t largest)
      : length(length), size(std::min(largest, length)), count(divide_up(length, size)) {}

  int64_t start(int64_t tile) const { return std::min(tile * size, length - size); }
  // The first element of a tile that the tile before does not have.
  int64_t first_new(int64_t tile) const { return tile * size - start(tile); }

  int64_t length, size, count;
};

}  // namespace kvselect

// Tiles of matrix products. brgemm (oneDNN's, through torch) uses the machine's own matrix unit, and
// generates code for every shape: so all tiles of a product have one shape.
//
// Throughout, T is the type that tensors store, and M the type that is multiplied: T itself, or float
// where the processor cannot multiply T.
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

inline float largest_lane(const Vec& vec) {
  return at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, vec);
}

// As many elements as a vector has, known when the code is compiled.
using Full = std::integral_constant<int64_t, kLanes>;

inline Vec load(const float* in, Full) { return Vec::loadu(in); }
inline Vec load(const float* in, int64_t count) { return Vec::loadu(in, count); }

// Calls `function(start, count)` for a range, in lanes; `count` is `Full` but for what is left over.
template <typename Function>
void for_lanes(int64_t begin, int64_t end, const Function& function) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) function(i, Full());
  if (i < end) function(i, end - i);
}

// Widens `count` elements; at::vec::convert does it one by one.
template <typename T>
void widen(const T* in, float* out, int64_t count) {
  if constexpr (std::is_same_v<T, float>) {
    std::copy_n(in, count, out);
  } else {
    using Narrow = at::vec::Vectorized<T>;
    for (int64_t i = 0; i < count; i += Narrow::size()) {
      const int64_t n = std::min<int64_t>(Narrow::size(), count - i), first = std::min(n, kLanes);
      const Narrow elements = n == Narrow::size() ? Narrow::loadu(in + i) : Narrow::loadu(in + i, n);
      const auto [low, high] = at::vec::convert_to_float<T>(elements);
      low.store(out + i, first);
      if (n > first) high.store(out + i + first, n - first);
    }
  }
}

// The right operand of brgemm, [depth, columns]: elements narrower than float stand in pairs of
// neighbours along the depth, [depth / 2, columns, 2].
template <typename M>
constexpr int64_t kPair = std::is_same_v<M, float> ? 1 : 2;

// Where an element of a row of `columns` elements stands in a packed right operand.
template <typename M>
int64_t packed_index(int64_t depth, int64_t column, int64_t columns) {
  return (depth / kPair<M> * columns + column) * kPair<M> + depth % kPair<M>;
}

template <typename T, typename M>
void pack(const T* in, int64_t row_stride, int64_t depth, int64_t columns, M* out) {
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t n = 0; n < columns; ++n)
      out[packed_index<M>(k, n, columns)] = static_cast<M>(in[k * row_stride + n]);
}

// c [m, n] = a [m, k] * b [k, n], of which b is packed in rows of ldb elements.
template <typename M>
void multiply(int64_t m, int64_t n, int64_t k, const M* a, int64_t lda, const M* b, int64_t ldb,
              float* c) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, n, false, a, b, c, kPair<M> == 2);
}

// Rows of a tensor as they are multiplied: where they stand, or widened in a buffer of a thread's own.
template <typename T, typename M>
class Rows {
 public:
  Rows(int64_t count, int64_t size) : size_(size), buffer_(kSame ? 0 : count * size) {}

  void point_at(const T* rows, int64_t row_stride, int64_t count) {
    if constexpr (kSame) {
      data = rows, stride = row_stride;
    } else {
      for (int64_t i = 0; i < count; ++i)
        widen(rows + i * row_stride, buffer_.data() + i * size_, size_);
      data = buffer_.data(), stride = size_;
    }
  }

  const M* data = nullptr;
  int64_t stride = 0;

 private:
  static constexpr bool kSame = std::is_same_v<T, M>;
  int64_t size_;
  std::vector<M> buffer_;
};

// Runs `body(i)` for all i below `count`, in parallel; `make_body` gives each thread its own.
template <typename M, typename MakeBody>
void parallel_tiles(int64_t count, const MakeBody& make_body) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    auto body = make_body();
    for (int64_t i = begin; i < end; ++i) body(i);
    at::native::cpublas::brgemm_release(kPair<M> == 2);
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

// The best of a row of floats without sorting it: selection.py and allocation.py.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace kvselect {

// Integers in the order of floats; what is no number comes first, as in torch's sort.
inline uint32_t sortable(float value) {
  if (value != value) return std::numeric_limits<uint32_t>::max();
  value += 0.f;  // one zero
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The cut of the `count` best: all above `threshold`, and the first `num_ties` that equal it.
struct Cut {
  uint32_t threshold;
  int64_t num_ties;
};

inline Cut find_cut(std::vector<uint32_t> keys, int64_t count) {
  if (count <= 0) return {std::numeric_limits<uint32_t>::max(), 0};
  const auto last = keys.begin() + (count - 1);
  std::nth_element(keys.begin(), last, keys.end(), std::greater<>());
  const int64_t num_above = std::count_if(keys.begin(), last, [&](uint32_t key) { return key > *last; });
  return {*last, count - num_above};
}

// Calls `take` with the indices of the `count` best of a row, ascending; the earlier on ties.
template <typename Take>
void for_best(const float* row, int64_t size, int64_t count, const Take& take) {
  std::vector<uint32_t> keys(size);
  std::transform(row, row + size, keys.begin(), sortable);
  auto [threshold, num_ties] = find_cut(keys, count);
  if (count <= 0) return;
  for (int64_t i = 0; i < size; ++i)
    if (keys[i] > threshold || (keys[i] == threshold && num_ties-- > 0)) take(i);
}

}  // namespace kvselect

// The best of a row of floats without sorting it: selection.py and allocation.py.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
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

// Counts the leading bits of all keys, so that only keys that share the cut's are put in order.
inline Cut find_cut(const std::vector<uint32_t>& keys, int64_t count) {
  if (count <= 0) return {std::numeric_limits<uint32_t>::max(), 0};
  constexpr int kShift = 32 - 11;
  std::array<int32_t, 1 << (32 - kShift)> histogram{};
  for (const uint32_t key : keys) ++histogram[key >> kShift];
  uint32_t leading = histogram.size();
  int64_t num_above = 0;
  while (num_above + histogram[--leading] < count) num_above += histogram[leading];
  std::vector<uint32_t> near;
  near.reserve(histogram[leading]);
  for (const uint32_t key : keys)
    if (key >> kShift == leading) near.push_back(key);
  const auto last = near.begin() + (count - num_above - 1);
  std::nth_element(near.begin(), last, near.end(), std::greater<>());
  num_above += std::count_if(near.begin(), last, [&](uint32_t key) { return key > *last; });
  return {*last, count - num_above};
}

// Calls `take` with the indices of the `count` best keys, ascending; the earlier on ties.
template <typename Take>
void for_best_keys(const std::vector<uint32_t>& keys, int64_t count, const Take& take) {
  if (count <= 0) return;
  auto [threshold, num_ties] = find_cut(keys, count);
  for (size_t i = 0; i < keys.size(); ++i)
    if (keys[i] > threshold || (keys[i] == threshold && num_ties-- > 0)) take(i);
}

// The same for a row of floats.
template <typename Take>
void for_best(const float* row, int64_t size, int64_t count, const Take& take) {
  std::vector<uint32_t> keys(size);
  std::transform(row, row + size, keys.begin(), sortable);
  for_best_keys(keys, count, take);
}

}  // namespace kvselect

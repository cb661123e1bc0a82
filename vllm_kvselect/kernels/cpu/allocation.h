// How a segment's pages are shared out over its heads: allocation.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "selection.h"

namespace kvselect {

// How many of a segment's `count` best entries each head has; equal scores fall to the earlier
// token, then to the lower head.
inline std::vector<int64_t> head_counts(const float* scores, int64_t num_heads, int64_t num_tokens, int64_t stride,
                                        int64_t count) {
  std::vector<uint32_t> keys(num_heads * num_tokens);
  for (int64_t head = 0; head < num_heads; ++head) {
    const float* row = scores + head * stride;
    std::transform(row, row + num_tokens, keys.begin() + head * num_tokens, sortable);
  }
  auto [threshold, num_ties] = find_cut(keys, count);
  std::vector<int64_t> counts(num_heads);
  for (int64_t head = 0; head < num_heads; ++head)
    counts[head] = std::count_if(keys.begin() + head * num_tokens, keys.begin() + (head + 1) * num_tokens,
                                 [threshold = threshold](uint32_t key) { return key > threshold; });
  for (int64_t token = 0; num_ties > 0 && token < num_tokens; ++token)
    for (int64_t head = 0; num_ties > 0 && head < num_heads; ++head)
      if (keys[head * num_tokens + token] == threshold) ++counts[head], --num_ties;
  return counts;
}

// Integers over `unit`, rounded so that the sum stays, the lower index first on ties.
inline std::vector<int64_t> largest_remainder(const std::vector<int64_t>& amounts, int64_t unit) {
  std::vector<int64_t> whole, order(amounts.size());
  int64_t left = 0;
  for (const int64_t amount : amounts) {
    whole.push_back(amount / unit);
    left += amount % unit;
  }
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return amounts[a] % unit > amounts[b] % unit; });
  for (int64_t i = 0; i < left / unit; ++i) ++whole[order[i]];
  return whole;
}

}  // namespace kvselect

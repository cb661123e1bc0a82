// Selection in two stages that computes only the norms it needs: `select_pruned` of pruning.py. Unlike
// there, every head has as many candidates as it needs itself.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "selection.h"
#include "tiles.h"
#include "value_norms.h"

namespace kvselect {

// Projected values of a layer: value [num_kv_heads, num_tokens, head_size], W_O packed by KV head, and
// the quadratic form and factor of the bounds.
struct Projection {
  const Tensor &value, &weight;
  int64_t group;
  const Tensor& bound_form;
  float bound_factor;
};

template <typename T, typename M>
class PrunedSelection {
 public:
  // scores, weights: [num_kv_heads, num_tokens] float; budgets, of_stage_1: [num_kv_heads] int64. Tokens
  // before `num_absent` [num_kv_heads] int64 are in no head.
  PrunedSelection(const Tensor& scores, const Tensor& weights, const Projection& projection,
                  const Tensor& budgets, const std::optional<Tensor>& num_absent, const Tensor& of_stage_1,
                  double eps)
      : scores_(scores), weights_(weights), projection_(projection),
        budgets_(budgets.const_data_ptr<int64_t>()),
        num_absent_(num_absent ? num_absent->const_data_ptr<int64_t>() : nullptr),
        of_stage_1_(of_stage_1.const_data_ptr<int64_t>()), eps_(static_cast<float>(eps)),
        num_kv_heads_(scores.size(0)), num_tokens_(scores.size(1)),
        norms_(at::zeros({num_kv_heads_, num_tokens_}, scores.options())),
        bounds_(num_kv_heads_ * num_tokens_), heads_(num_kv_heads_) {}

  // The retained entries' flat indices, ascending, and the norms that it took to find them.
  std::tuple<Tensor, Tensor> select() {
    bound_norms<T, M>(projection_.value, projection_.bound_form, projection_.bound_factor, bounds_.data());
    for_heads([&](int64_t head) {
      take_stage_1(head);
      choose_likely(head);
    });
    project_chosen();
    for_heads([&](int64_t head) { choose_possible(head); });
    project_chosen();
    for_heads([&](int64_t head) { take_stage_2(head); });
    return {indices(), norms_};
  }

 private:
  struct Head {
    std::vector<uint8_t> retained;
    std::vector<int32_t> chosen;      // tokens to be projected
    std::vector<int32_t> candidates;  // tokens that have been, ascending
    int64_t num_open = 0;             // entries that stage 2 retains
  };

  template <typename Body>
  void for_heads(const Body& body) {
    at::parallel_for(0, num_kv_heads_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t head = begin; head < end; ++head) body(head);
    });
  }

  void take_stage_1(int64_t index) {
    Head& head = heads_[index];
    const int64_t count = of_stage_1_[index];
    head.num_open = budgets_[index] - count;
    head.retained.assign(num_tokens_, false);
    const int64_t first = first_of(index);
    for_best(scores_.const_data_ptr<float>() + index * scores_.stride(0) + first, num_tokens_ - first, count,
             [&](int64_t token) { head.retained[first + token] = true; });
  }

  // Those with the best bounds, a quarter more than are retained: of 1 to 2 times as many this
  // needed the fewest norms in all.
  void choose_likely(int64_t index) {
    Head& head = heads_[index];
    float* bounds = &bounds_[index * num_tokens_];
    const int64_t first = first_of(index);
    std::fill_n(bounds, first, -1.f);
    for (int64_t t = first; t < num_tokens_; ++t)
      bounds[t] = head.retained[t] ? -1.f : bounds[t] * weight_of(index, t);
    const int64_t num_left = num_tokens_ - first - budgets_[index] + head.num_open;
    for_best(bounds, num_tokens_, std::min(divide_up(5 * head.num_open, 4), num_left),
             [&](int64_t token) { head.chosen.push_back(token); });
  }

  // What the last retained of these reaches is a cut that every retained entry's bound reaches.
  void choose_possible(int64_t index) {
    Head& head = heads_[index];
    const uint32_t cut = find_cut(keys_of(index), head.num_open).threshold;
    float* bounds = &bounds_[index * num_tokens_];
    for (const int32_t token : head.candidates) bounds[token] = -1.f;
    for (int64_t t = 0; t < num_tokens_; ++t)
      if (sortable(bounds[t]) >= cut) head.chosen.push_back(t);
  }

  void project_chosen() {
    std::vector<Entry> entries;
    for (int32_t index = 0; index < num_kv_heads_; ++index) {
      auto& [retained, chosen, candidates, num_open] = heads_[index];
      for (const int32_t token : chosen) entries.push_back({index, token});
      const auto middle = candidates.insert(candidates.end(), chosen.begin(), chosen.end());
      std::inplace_merge(candidates.begin(), middle, candidates.end());
      chosen.clear();
    }
    project<T, M>(projection_.value, projection_.weight, projection_.group, entries, norms_);
  }

  void take_stage_2(int64_t index) {
    Head& head = heads_[index];
    for_best_keys(keys_of(index), head.num_open, [&](size_t i) { head.retained[head.candidates[i]] = true; });
  }

  int64_t first_of(int64_t index) const { return num_absent_ ? num_absent_[index] : 0; }

  float weight_of(int64_t index, int64_t token) const {
    return weights_.const_data_ptr<float>()[index * weights_.stride(0) + token] + eps_;
  }

  // What stage 2 ranks a head's candidates by.
  std::vector<uint32_t> keys_of(int64_t index) const {
    std::vector<uint32_t> keys;
    const float* norms = norms_.const_data_ptr<float>() + index * num_tokens_;
    for (const int32_t token : heads_[index].candidates)
      keys.push_back(sortable(weight_of(index, token) * norms[token]));
    return keys;
  }

  Tensor indices() const {
    const int64_t num_retained = std::accumulate(budgets_, budgets_ + num_kv_heads_, int64_t{0});
    Tensor indices = at::empty({num_retained}, scores_.options().dtype(at::kLong));
    int64_t* next = indices.mutable_data_ptr<int64_t>();
    for (int64_t index = 0; index < num_kv_heads_; ++index)
      for (int64_t t = 0; t < num_tokens_; ++t)
        if (heads_[index].retained[t]) *next++ = index * num_tokens_ + t;
    return indices;
  }

  const Tensor &scores_, &weights_;
  const Projection& projection_;
  const int64_t *budgets_, *num_absent_, *of_stage_1_;
  const float eps_;
  const int64_t num_kv_heads_, num_tokens_;
  Tensor norms_;
  std::vector<float> bounds_;
  std::vector<Head> heads_;
};

}  // namespace kvselect

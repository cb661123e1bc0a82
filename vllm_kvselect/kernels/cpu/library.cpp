// The operators that kernels/cpu.py calls.

#include <torch/library.h>

#include "allocation.h"
#include "criticality.h"
#include "probe.h"
#include "selection.h"
#include "similarity.h"
#include "tiles.h"
#include "two_stages.h"
#include "value_norms.h"
#include "window_attention.h"

namespace kvselect {

template <typename T>
using element = std::remove_pointer_t<T>;

// Calls `function` with null pointers of the stored and of the multiplied type.
template <typename Function>
auto dispatch(at::ScalarType stored, at::ScalarType multiplied, const Function& function) {
  float* const wide = nullptr;
  at::BFloat16* const brain = nullptr;
  if (stored == at::kBFloat16 && multiplied == at::kBFloat16) return function(brain, brain);
  TORCH_CHECK(multiplied == at::kFloat, stored, " is not multiplied as ", multiplied);
  if (stored == at::kBFloat16) return function(brain, wide);
  if (stored == at::kHalf) return function(static_cast<at::Half*>(nullptr), wide);
  TORCH_CHECK(stored == at::kFloat, "bfloat16, float16 or float32, not ", stored);
  return function(wide, wide);
}

// How many of the first tokens each head lacks: integers, or nothing where all have all.
bool fits(const std::optional<Tensor>& num_absent, int64_t num_heads) {
  return !num_absent || (num_absent->scalar_type() == at::kLong && num_absent->is_contiguous() &&
                         num_absent->numel() == num_heads);
}

// The mean over the window's rows, or the maximum, pooled over `kernel_size` neighbouring tokens; `sinks`
// are [num_heads] float.
Tensor window_attention(const Tensor& query, const Tensor& key, double scale, int64_t kernel_size,
                        const std::optional<Tensor>& sinks, const std::optional<Tensor>& num_absent,
                        at::ScalarType multiplied, bool largest) {
  TORCH_CHECK(query.stride(2) == 1 && key.stride(2) == 1 && fits(num_absent, key.size(0)));
  TORCH_CHECK(!sinks || (sinks->is_contiguous() && sinks->numel() == query.size(1)));
  const Tensor attention = dispatch(key.scalar_type(), multiplied, [&](auto t, auto m) {
    using Attention = WindowAttention<element<decltype(t)>, element<decltype(m)>>;
    return Attention(query, key, scale, sinks, num_absent).over_rows(largest);
  });
  return max_pool(attention, kernel_size);
}

// The sum of each key's cosines with the others of its head, but for what goes to the latest of those alike.
Tensor similarities(const Tensor& key, double threshold, const std::optional<Tensor>& num_absent,
                    at::ScalarType multiplied) {
  TORCH_CHECK(key.stride(2) == 1 && fits(num_absent, key.size(0)));
  return dispatch(key.scalar_type(), multiplied, [&](auto t, auto m) {
    return Similarity<element<decltype(t)>, element<decltype(m)>>(key, threshold, num_absent).sums();
  });
}

// What a probe says of tokens. Tables are [num_tokens, pairs] float, and may have no pairs.
Tensor probe_scores(const Tensor& key, const Tensor& value, const Tensor& weights, const Tensor& cos,
                    const Tensor& sin, int64_t first_position, double per_token) {
  const int64_t head_size = key.size(2);
  TORCH_CHECK(key.stride(2) == 1 && value.stride(2) == 1 && value.sizes() == key.sizes());
  TORCH_CHECK(weights.is_contiguous() && weights.size(0) == key.size(0));
  TORCH_CHECK(weights.size(1) == 2 * head_size + 1);
  TORCH_CHECK(cos.sizes() == sin.sizes() && cos.size(0) == key.size(1) && 2 * cos.size(1) <= head_size);
  TORCH_CHECK(cos.stride(1) == 1 && sin.stride(1) == 1);
  Tensor scores = at::empty({key.size(0), key.size(1)}, key.options().dtype(at::kFloat));
  dispatch(key.scalar_type(), at::kFloat, [&](auto t, auto) {
    const Probe<element<decltype(t)>> probe{key, value, weights, cos, sin};
    probe.score(first_position, per_token, scores);
  });
  return scores;
}

// The largest and the smallest value of every channel over groups of `size` tokens: [2, heads, groups, head_size].
Tensor extremes(const Tensor& vectors, int64_t size) {
  TORCH_CHECK(vectors.stride(2) == 1 && vectors.size(1) % size == 0);
  Tensor found = at::empty({2, vectors.size(0), vectors.size(1) / size, vectors.size(2)}, vectors.options());
  dispatch(vectors.scalar_type(), at::kFloat,
           [&](auto t, auto) { write_extremes<element<decltype(t)>>(vectors, size, found); });
  return found;
}

// Criticality before the softmax; minus infinity for blocks that are not before a segment.
Tensor critical_logits(const Tensor& middle, const Tensor& largest, const Tensor& smallest, double scale,
                       const Tensor& num_before) {
  TORCH_CHECK(middle.is_contiguous() && middle.scalar_type() == at::kFloat && num_before.is_contiguous());
  TORCH_CHECK(largest.stride(2) == 1 && smallest.stride(2) == 1 && largest.sizes() == smallest.sizes());
  TORCH_CHECK(middle.size(0) == largest.size(0) && middle.size(3) == largest.size(2));
  TORCH_CHECK(num_before.numel() == middle.size(2) && num_before.scalar_type() == at::kLong);
  Tensor logits = at::full({middle.size(2), largest.size(0), largest.size(1)},
                           -std::numeric_limits<double>::infinity(), middle.options());
  dispatch(largest.scalar_type(), at::kFloat, [&](auto t, auto) {
    Criticality<element<decltype(t)>>{middle, largest, smallest, num_before}.multiply(scale, logits);
  });
  return logits;
}

// The weight in the order and in the type in which it is multiplied.
Tensor pack_weight(const Tensor& weight, at::ScalarType multiplied) {
  TORCH_CHECK(weight.is_contiguous());
  Tensor packed = at::empty(weight.sizes(), weight.options().dtype(multiplied));
  const int64_t head_size = weight.size(1), width = weight.stride(1);
  dispatch(weight.scalar_type(), multiplied, [&](auto t, auto m) {
    using T = element<decltype(t)>;
    using M = element<decltype(m)>;
    for (int64_t head = 0; head < weight.size(0); ++head)
      pack(weight.const_data_ptr<T>() + head * head_size * width, width, head_size, width,
           packed.mutable_data_ptr<M>() + head * head_size * width);
  });
  return packed;
}

Tensor value_norms(const Tensor& value, const Tensor& packed, int64_t group) {
  TORCH_CHECK(value.stride(2) == 1 && packed.is_contiguous());
  Tensor norms = at::empty({value.size(0), value.size(1)}, value.options().dtype(at::kFloat));
  std::vector<Entry> entries;
  for (int32_t head = 0; head < value.size(0); ++head)
    for (int32_t token = 0; token < value.size(1); ++token) entries.push_back({head, token});
  dispatch(value.scalar_type(), packed.scalar_type(), [&](auto t, auto m) {
    project<element<decltype(t)>, element<decltype(m)>>(value, packed, group, entries, norms);
  });
  return norms;
}

// Flat indices of what is retained, and the norms that it took to find them.
std::tuple<Tensor, Tensor> select_pruned(const Tensor& scores, const Tensor& weights, const Tensor& value,
                                         const Tensor& packed, int64_t group, const Tensor& form,
                                         double factor, const Tensor& budgets,
                                         const std::optional<Tensor>& num_absent, const Tensor& of_stage_1,
                                         double eps) {
  TORCH_CHECK(value.stride(2) == 1 && packed.is_contiguous() && form.is_contiguous());
  TORCH_CHECK(scores.stride(1) == 1 && weights.stride(1) == 1 && budgets.is_contiguous());
  TORCH_CHECK(of_stage_1.is_contiguous() && of_stage_1.size(0) == value.size(0));
  TORCH_CHECK(fits(num_absent, value.size(0)));
  return dispatch(value.scalar_type(), packed.scalar_type(), [&](auto t, auto m) {
    using Selection = PrunedSelection<element<decltype(t)>, element<decltype(m)>>;
    const Projection projection{value, packed, group, form, static_cast<float>(factor)};
    return Selection(scores, weights, projection, budgets, num_absent, of_stage_1, eps).select();
  });
}

// A mask of the best `counts[head]` entries of every head.
Tensor best_mask(const Tensor& scores, const Tensor& counts) {
  TORCH_CHECK(scores.stride(1) == 1 && counts.is_contiguous());
  Tensor mask = at::zeros(scores.sizes(), scores.options().dtype(at::kBool));
  bool* out = mask.mutable_data_ptr<bool>();
  at::parallel_for(0, scores.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head)
      for_best(scores.const_data_ptr<float>() + head * scores.stride(0), scores.size(1),
               counts.const_data_ptr<int64_t>()[head],
               [&](int64_t token) { out[head * scores.size(1) + token] = true; });
  });
  return mask;
}

// Their flat indices, ascending.
Tensor best_indices(const Tensor& scores, const Tensor& counts, int64_t num_retained) {
  TORCH_CHECK(scores.stride(1) == 1 && counts.is_contiguous());
  const int64_t num_heads = scores.size(0), num_tokens = scores.size(1);
  const int64_t* count = counts.const_data_ptr<int64_t>();
  std::vector<int64_t> starts(num_heads + 1, 0);
  for (int64_t head = 0; head < num_heads; ++head) starts[head + 1] = starts[head] + count[head];
  TORCH_CHECK(starts[num_heads] == num_retained);
  Tensor indices = at::empty({num_retained}, counts.options());
  int64_t* out = indices.mutable_data_ptr<int64_t>();
  at::parallel_for(0, num_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      int64_t* next = out + starts[head];
      for_best(scores.const_data_ptr<float>() + head * scores.stride(0), num_tokens, count[head],
               [&](int64_t token) { *next++ = head * num_tokens + token; });
    }
  });
  return indices;
}

// Scores, of which the best `counts[segment]` of every head are infinite; what is not there stays so.
Tensor best_first(const Tensor& scores, at::IntArrayRef counts) {
  const int64_t num_heads = scores.size(1), num_tokens = scores.size(2);
  TORCH_CHECK(scores.stride(2) == 1 && scores.size(0) == static_cast<int64_t>(counts.size()));
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  Tensor raised = scores.clone(at::MemoryFormat::Contiguous);
  float* out = raised.mutable_data_ptr<float>();
  at::parallel_for(0, scores.size(0) * num_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      float* row = out + head * num_tokens;
      // The keys are copied before any is raised.
      for_best(row, num_tokens, counts[head / num_heads], [&](int64_t token) {
        if (row[token] > -kInfinity) row[token] = kInfinity;
      });
    }
  });
  return raised;
}

// Pages of every head of every segment: how many of its segment's best entries it has, with a share of the
// even budget blended in, and rounded. `share` is in `unit`ths.
Tensor share_out(const Tensor& scores, at::IntArrayRef num_packed, int64_t block_size, int64_t share, int64_t unit) {
  const int64_t num_segments = scores.size(0), num_heads = scores.size(1);
  TORCH_CHECK(scores.stride(2) == 1 && num_segments == static_cast<int64_t>(num_packed.size()));
  Tensor pages = at::empty({num_segments, num_heads}, scores.options().dtype(at::kLong));
  int64_t* out = pages.mutable_data_ptr<int64_t>();
  at::parallel_for(0, num_segments, 1, [&](int64_t begin, int64_t end) {
    for (int64_t segment = begin; segment < end; ++segment) {
      const int64_t even = num_packed[segment] * block_size;
      const float* own = scores.const_data_ptr<float>() + segment * scores.stride(0);
      std::vector<int64_t> budgets =
          head_counts(own, num_heads, scores.size(2), scores.stride(1), even * num_heads);
      for (int64_t& budget : budgets) budget = budget * (unit - share) + share * even;
      const std::vector<int64_t> rounded = largest_remainder(budgets, unit * block_size);
      std::copy(rounded.begin(), rounded.end(), out + segment * num_heads);
    }
  });
  return pages;
}

// Calls `function` with a null pointer of an integer as wide as the tensor's elements.
template <typename Function>
void dispatch_size(const Tensor& tensor, const Function& function) {
  switch (tensor.element_size()) {
    case 1: return function(static_cast<uint8_t*>(nullptr));
    case 2: return function(static_cast<uint16_t*>(nullptr));
    case 4: return function(static_cast<uint32_t*>(nullptr));
    case 8: return function(static_cast<uint64_t*>(nullptr));
    default: TORCH_CHECK(false, "elements of 1, 2, 4 or 8 bytes, not ", tensor.scalar_type());
  }
}

// Runs of `size` elements: the i-th from the page and out of the places that `run_at(i)` gives.
template <typename Element, typename RunAt>
void read_runs(const Tensor& cache, Tensor& runs, const RunAt& run_at) {
  const auto* in = static_cast<const Element*>(cache.const_data_ptr());
  auto* out = static_cast<Element*>(runs.mutable_data_ptr());
  const int64_t size = runs.size(1), grain = divide_up(4096, size);
  at::parallel_for(0, runs.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto [page, place] = run_at(i);
      const Element* __restrict from = in + page * cache.stride(0);
      Element* __restrict to = out + i * size;
      for (int64_t j = 0; j < size; ++j) to[j] = from[place[j]];
    }
  });
}

// Chosen pages, their elements in the order of `places`.
Tensor read_pages(const Tensor& cache, const Tensor& pages, const Tensor& places) {
  TORCH_CHECK(cache.stride(1) == 1 && pages.is_contiguous() && places.is_contiguous());
  Tensor entries = at::empty({pages.numel(), places.numel()}, cache.options());
  const int64_t* page = pages.const_data_ptr<int64_t>();
  const int32_t* place = places.const_data_ptr<int32_t>();
  dispatch_size(cache, [&](auto type) {
    read_runs<element<decltype(type)>>(cache, entries, [&](int64_t i) { return std::pair(page[i], place); });
  });
  return entries;
}

// Entries in chosen slots `page * block_size + offset`, their elements in the order of `places`.
Tensor read_entries(const Tensor& cache, const Tensor& slots, const Tensor& places, int64_t block_size) {
  TORCH_CHECK(cache.stride(1) == 1 && slots.is_contiguous() && places.is_contiguous());
  const int64_t size = places.numel() / block_size;
  Tensor entries = at::empty({slots.numel(), size}, cache.options());
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const int32_t* place = places.const_data_ptr<int32_t>();
  dispatch_size(cache, [&](auto type) {
    read_runs<element<decltype(type)>>(cache, entries, [&](int64_t i) {
      return std::pair(slot[i] / block_size, place + slot[i] % block_size * size);
    });
  });
  return entries;
}

// The same the other way round; no two entries go to one slot.
void write_entries(const Tensor& cache, const Tensor& slots, const Tensor& places, int64_t block_size,
                   const Tensor& entries) {
  const int64_t size = places.numel() / block_size;
  TORCH_CHECK(cache.stride(1) == 1 && slots.is_contiguous() && places.is_contiguous());
  TORCH_CHECK(entries.is_contiguous() && entries.size(0) == slots.numel() && entries.size(1) == size);
  TORCH_CHECK(entries.scalar_type() == cache.scalar_type());
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const int32_t* places_of = places.const_data_ptr<int32_t>();
  dispatch_size(cache, [&](auto type) {
    using Element = element<decltype(type)>;
    auto* out = static_cast<Element*>(cache.mutable_data_ptr());
    const auto* in = static_cast<const Element*>(entries.const_data_ptr());
    at::parallel_for(0, slots.numel(), divide_up(4096, size), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int32_t* __restrict place = places_of + slot[i] % block_size * size;
        const Element* __restrict from = in + i * size;
        Element* __restrict to = out + slot[i] / block_size * cache.stride(0);
        for (int64_t j = 0; j < size; ++j) to[place[j]] = from[j];
      }
    });
  });
}

// The numbers that bytes stand for.
Tensor look_up(const Tensor& codes, const Tensor& numbers) {
  TORCH_CHECK(codes.is_contiguous() && codes.scalar_type() == at::kByte);
  TORCH_CHECK(numbers.is_contiguous() && numbers.numel() == 256);
  Tensor found = at::empty(codes.sizes(), numbers.options());
  const uint8_t* in = codes.const_data_ptr<uint8_t>();
  dispatch_size(numbers, [&](auto type) {
    using Element = element<decltype(type)>;
    const auto* number = static_cast<const Element*>(numbers.const_data_ptr());
    auto* out = static_cast<Element*>(found.mutable_data_ptr());
    at::parallel_for(0, codes.numel(), 16384, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) out[i] = number[in[i]];
    });
  });
  return found;
}

}  // namespace kvselect

TORCH_LIBRARY(vllm_kvselect, library) {
  using namespace kvselect;
  library.def(
      "window_attention(Tensor query, Tensor key, float scale, int kernel_size, Tensor? sinks, "
      "Tensor? num_absent, ScalarType multiplied, bool largest) -> Tensor", window_attention);
  library.def(
      "similarities(Tensor key, float threshold, Tensor? num_absent, ScalarType multiplied) -> Tensor", similarities);
  library.def(
      "probe_scores(Tensor key, Tensor value, Tensor weights, Tensor cos, Tensor sin, int first_position, "
      "float per_token) -> Tensor", probe_scores);
  library.def("extremes(Tensor vectors, int size) -> Tensor", extremes);
  library.def(
      "critical_logits(Tensor middle, Tensor largest, Tensor smallest, float scale, Tensor num_before) -> Tensor",
      critical_logits);
  library.def("pack_weight(Tensor weight, ScalarType multiplied) -> Tensor", pack_weight);
  library.def("value_norms(Tensor value, Tensor packed, int group) -> Tensor", value_norms);
  library.def(
      "select_pruned(Tensor scores, Tensor weights, Tensor value, Tensor packed, int group, Tensor form, "
      "float factor, Tensor budgets, Tensor? num_absent, Tensor of_stage_1, float eps) -> (Tensor, Tensor)", select_pruned);
  library.def("best_mask(Tensor scores, Tensor counts) -> Tensor", best_mask);
  library.def("best_indices(Tensor scores, Tensor counts, int num_retained) -> Tensor", best_indices);
  library.def("best_first(Tensor scores, int[] counts) -> Tensor", best_first);
  library.def("share_out(Tensor scores, int[] num_packed, int block_size, int share, int unit) -> Tensor", share_out);
  library.def("read_pages(Tensor cache, Tensor pages, Tensor places) -> Tensor", read_pages);
  library.def("read_entries(Tensor cache, Tensor slots, Tensor places, int block_size) -> Tensor", read_entries);
  library.def(
      "write_entries(Tensor(a!) cache, Tensor slots, Tensor places, int block_size, Tensor entries) -> ()",
      write_entries);
  library.def("look_up(Tensor codes, Tensor numbers) -> Tensor", look_up);
}

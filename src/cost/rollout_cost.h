// The cost of generating a batch (DistillSparse, appendix B: C_rollout), with dense attention or with a
// budget of keys per sampled token. Plans predict the other costs of the appendix, C_recompute and C_update.
//
// Each decoding pass samples one token for each running sample. Its seconds are the sum of:
// - the products of the layers and lm_head, at the device's measured rate for that number of running samples,
//   which includes reading the weights;
// - attention, as in the appendix: FLOPs at the rate of products, plus bytes of keys and values at the
//   memory's rate.
// With budget K, prompt length L_in and response length L_out, the keys that a response attends to are
//
//   sum of keys attended to = H / 2,   H = (2 L_in + L_dense) L_dense + 2 K (L_out - L_dense)+,
//   L_dense = min(L_out, K - L_in), at least 0 (a prompt longer than the budget leaves none)
//
// Additions to the appendix:
//   dense layers   the first layers attend to the whole context, whatever the budget
//   summaries      a layer with block selection reads and scores one summary per block
//   common pages   a page of a group's prompt that several samples read is read once. Samples that select a
//                  fraction f of their contexts are assumed to select independently: n such samples read the
//                  fraction 1 - (1 - f)^n of the prompt. Dense samples read the whole prompt
//   prompts        computed once per group
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <vector>

#include "cost/cost_model.h"

namespace bough {

struct SparseAttention {
  // Key: the context length from which on an entry applies. Value: the number of keys that a sampled token
  // attends to at such lengths. The first key is 0. An empty map means dense attention.
  std::map<int64_t, int64_t> budgets;
  int64_t dense_layers = 2;         // number of first layers without block selection
  int64_t vectors_per_summary = 1;  // per block: 1 for mean, 2 for minmax
  int64_t block_tokens = 16;

  bool is_sparse() const { return !budgets.empty(); }
  int64_t budget_at(int64_t context) const { return std::prev(budgets.upper_bound(context))->second; }
};

// A prompt and the lengths of the responses to it.
struct SampledGroup {
  int64_t prompt_tokens = 0;
  std::vector<int64_t> response_tokens;
};

struct RolloutCost {
  double prefill_seconds = 0, product_seconds = 0, attention_seconds = 0;
  double kv_bytes = 0, summary_bytes = 0;  // read by decoding, all layers
  double keys = 0;                         // attended keys, summed over samples, passes and layers
  int64_t passes = 0, tokens = 0;          // decoding passes, sampled tokens

  double seconds() const { return prefill_seconds + product_seconds + attention_seconds; }
  double bytes() const { return kv_bytes + summary_bytes; }
};

// At most `max_running` samples run at once. When one ends, the next one starts. Throws InternalError if the
// profile lacks DeviceProfile::memory_bytes_per_s.
RolloutCost rollout_cost(const CostModel& costs, const std::vector<SampledGroup>& groups,
                         const SparseAttention& sparse, int64_t max_running);

}  // namespace bough

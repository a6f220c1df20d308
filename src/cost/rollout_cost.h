// What generating a batch costs (DistillSparse, appendix B: C_rollout), dense or with a budget of keys and
// values, so that it stands beside C_recompute and C_update, which plans say.
//
// Every pass of decoding draws a token of each running sample. It takes the layers' and the head's products,
// at the device's measured rate for so few rows, the reading of weights included; and attention: FLOPs at the
// rate of products, and bytes of keys and values at that of memory, added up as the appendix adds them. Over
// a response that is
//
//   sum of keys attended to = H / 2,   H = (2 L_in + L_dense) L_dense + 2 K (L_out - L_dense)+,
//   L_dense = min(L_out, K - L_in), at least 0 (a prompt longer than the budget leaves none)
//
// Added to the appendix:
//   dense layers   the first ones attend to all of it, whatever the budget
//   summaries      where a choice is made, a layer reads one of each page of 16 tokens, and scores it
//   sharing        of a group's prompt each page that some of its samples read is read once. Samples that
//                  choose a share f of their contexts are taken to choose independently: 1 - (1 - f)^n of it
//                  is read, all of it where they are dense
//   prompts        computed once a group
#pragma once

#include <cstdint>
#include <vector>

#include "cost/cost_model.h"

namespace bough {

struct SparseAttention {
  int64_t budget_tokens = 0;        // 0: dense
  int64_t dense_layers = 2;         // the first ones
  int64_t vectors_per_summary = 1;  // of a page: 1 mean, 2 minmax
};

// A prompt and the lengths of the responses to it.
struct SampledGroup {
  int64_t prompt_tokens = 0;
  std::vector<int64_t> response_tokens;
};

struct RolloutCost {
  double prefill_seconds = 0, product_seconds = 0, attention_seconds = 0;
  double kv_bytes = 0, summary_bytes = 0;  // read by decoding, all layers
  double keys = 0;                         // attended to, summed over samples, passes and layers
  int64_t passes = 0, tokens = 0;          // drawn

  double seconds() const { return prefill_seconds + product_seconds + attention_seconds; }
  double bytes() const { return kv_bytes + summary_bytes; }
};

// At most `max_running` samples at once; the next begins when one ends. InternalError: a profile without the
// rate of memory (DeviceProfile::memory_bytes_per_s).
RolloutCost rollout_cost(const CostModel& costs, const std::vector<SampledGroup>& groups,
                         const SparseAttention& sparse, int64_t max_running);

}  // namespace bough

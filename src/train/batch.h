// A batch as the executor takes it: sequences, which of their tokens train, and the loss's fields, one row a
// trained token of a sequence.
#pragma once

#include <span>
#include <vector>

#include "algo/loss.h"
#include "plan/plan.h"
#include "train/settings.h"

namespace bough {

struct TrainBatch {
  std::vector<TokenSpan> sequences;                     // not owned
  std::vector<std::vector<int32_t>> trained_positions;  // of each sequence, ascending, all > 0: its loss rows
  std::vector<int64_t> row_offset;  // [S + 1]: rows of sequence s are [row_offset[s], row_offset[s + 1])
  double temperature = 1;           // the head divides logits by it
  // Fields of all rows on the CPU, accumulator type; log_probs_R and entropies_R are the executor's.
  LossRows fields;

  int64_t num_rows() const { return row_offset.back(); }
};

// Sequences with their masks (position 0 is ignored: it has no prediction); fields other than sequences_R are left
// undefined.
TrainBatch make_batch(const std::vector<TokenSpan>& sequences,
                      const std::vector<std::span<const uint8_t>>& loss_masks, double temperature);

// What make_plan needs of the batch; memory and costs are the caller's to add. The spans are the batch's own.
PlanRequest plan_request(const TrainBatch& batch, int64_t max_tokens_per_pass);
// The same under a run's settings; the memory budget counts where there are costs, which are not owned either.
PlanRequest plan_request(const TrainBatch& batch, const MicroBatchSettings& settings, const PassCosts* costs);

}  // namespace bough

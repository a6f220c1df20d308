#include "train/batch.h"

#include <ATen/ATen.h>

#include "base/error.h"

namespace bough {

TrainBatch make_batch(const std::vector<TokenSpan>& sequences,
                      const std::vector<std::span<const uint8_t>>& loss_masks, double temperature) {
  BOUGH_CHECK(sequences.size() == loss_masks.size(), "sequences ", sequences.size(), ", masks ",
              loss_masks.size());
  TrainBatch batch;
  batch.sequences = sequences;
  batch.temperature = temperature;
  batch.row_offset.push_back(0);
  std::vector<int64_t> row_sequences;
  for (size_t s = 0; s < sequences.size(); ++s) {
    BOUGH_CHECK(sequences[s].size() == loss_masks[s].size(), "sequence ", s, " has ", sequences[s].size(),
                " tokens, its mask ", loss_masks[s].size());
    std::vector<int32_t> positions;
    for (size_t i = 1; i < sequences[s].size(); ++i)
      if (loss_masks[s][i]) positions.push_back(static_cast<int32_t>(i));
    row_sequences.insert(row_sequences.end(), positions.size(), static_cast<int64_t>(s));
    batch.row_offset.push_back(batch.row_offset.back() + static_cast<int64_t>(positions.size()));
    batch.trained_positions.push_back(std::move(positions));
  }
  batch.fields.sequences_R = at::tensor(row_sequences, at::kLong);
  return batch;
}

PlanRequest plan_request(const TrainBatch& batch, int64_t max_tokens_per_pass) {
  PlanRequest request{
      .sequences = batch.sequences, .trained = {}, .max_tokens_per_pass = max_tokens_per_pass};
  for (size_t s = 0; s < batch.sequences.size(); ++s) {
    const size_t begin = request.trained.size();
    request.trained.resize(begin + batch.sequences[s].size(), 0);
    for (const int32_t position : batch.trained_positions[s]) request.trained[begin + position] = 1;
  }
  return request;
}

PlanRequest plan_request(const TrainBatch& batch, const MicroBatchSettings& settings, const PassCosts* costs) {
  PlanRequest request = plan_request(batch, settings.max_tokens_per_mb);
  request.costs = costs;
  if (costs && !settings.memory.is_auto()) request.memory_bytes = settings.memory.count;
  return request;
}

}  // namespace bough

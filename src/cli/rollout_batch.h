// From a rollout file to what the executor takes.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "train/batch.h"
#include "data/rollout_file.h"

namespace bough {

// The rollouts of a file and views of them; moving it keeps the views valid, copying would not.
struct RolloutBatch {
  std::vector<Trajectory> rollouts;
  std::vector<TokenSpan> sequences;
  std::vector<std::span<const uint8_t>> loss_masks;

  explicit RolloutBatch(std::vector<Trajectory> read);
  RolloutBatch(RolloutBatch&&) = default;
  RolloutBatch(const RolloutBatch&) = delete;

  double temperature() const { return rollouts.empty() ? 1.0 : rollouts.front().temperature; }
  std::vector<uint8_t> trained_flags() const;  // one a flat token, sequence after sequence; position 0 is 0
};

// The advantage of every token of every sequence, [S][1 or tokens]: the file's where it gives one, else
// GRPO's from the rewards of the sequence's group (algorithms in algo/advantages.h).
std::vector<std::vector<double>> rollout_advantages(const std::vector<Trajectory>& rollouts);

// With advantages, behaviour log-probabilities and weights of the mean over all trained tokens, in `type`
// (the model's accumulator type).
TrainBatch make_train_batch(const RolloutBatch& batch, at::ScalarType type);

}  // namespace bough

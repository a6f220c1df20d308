#include "cli/rollout_batch.h"

#include <ATen/ops/tensor.h>

#include <map>

#include "algo/advantages.h"
#include "algo/aggregation.h"
#include "base/error.h"

namespace bough {

RolloutBatch::RolloutBatch(std::vector<Trajectory> read) : rollouts(std::move(read)) {
  for (const Trajectory& rollout : rollouts) {
    sequences.emplace_back(rollout.input_ids);
    loss_masks.emplace_back(rollout.loss_mask);
  }
}

std::vector<uint8_t> RolloutBatch::trained_flags() const {
  std::vector<uint8_t> flags;
  for (const Trajectory& rollout : rollouts)
    for (size_t i = 0; i < rollout.input_ids.size(); ++i) flags.push_back(rollout.trains(i));
  return flags;
}

std::vector<std::vector<double>> rollout_advantages(const std::vector<Trajectory>& rollouts) {
  // A sequence that brings its own advantage still counts in its group's mean where it has a reward too.
  std::vector<double> rewards;
  std::vector<int64_t> groups;
  std::vector<size_t> rewarded;
  std::map<std::string, int64_t> group_ids;
  for (size_t s = 0; s < rollouts.size(); ++s) {
    if (!rollouts[s].reward) continue;
    rewarded.push_back(s);
    rewards.push_back(*rollouts[s].reward);
    groups.push_back(
        group_ids.try_emplace(rollouts[s].group, static_cast<int64_t>(group_ids.size())).first->second);
  }
  const std::vector<double> from_rewards = compute_advantages(AdvantageSettings{}, rewards, groups);
  std::vector<std::vector<double>> advantages(rollouts.size());
  for (size_t i = 0; i < rewarded.size(); ++i) advantages[rewarded[i]] = {from_rewards[i]};
  for (size_t s = 0; s < rollouts.size(); ++s) {
    const auto& own = rollouts[s].advantage;
    if (!own.empty()) advantages[s].assign(own.begin(), own.end());
    BOUGH_CHECK(!advantages[s].empty(), "sequence ", s, " has neither reward nor advantage");
  }
  return advantages;
}

TrainBatch make_train_batch(const RolloutBatch& batch, at::ScalarType type) {
  TrainBatch train = make_batch(batch.sequences, batch.loss_masks, batch.temperature());
  const auto advantages = rollout_advantages(batch.rollouts);
  std::vector<double> advantages_R, behaviour_R;
  std::vector<int64_t> trained_tokens;
  for (size_t s = 0; s < batch.rollouts.size(); ++s) {
    const auto& positions = train.trained_positions[s];
    trained_tokens.push_back(static_cast<int64_t>(positions.size()));
    for (const int32_t position : positions) {
      advantages_R.push_back(advantages[s].size() == 1 ? advantages[s][0] : advantages[s][position]);
      behaviour_R.push_back(batch.rollouts[s].logprobs[position]);
    }
  }
  train.fields.advantages_R = at::tensor(advantages_R, type);
  train.fields.behaviour_log_probs_R = at::tensor(behaviour_R, type);
  const auto weights = sequence_weights(AggregationSettings{}, trained_tokens, {});
  train.fields.weights_R = expand_to_rows(weights, train.fields.sequences_R, type);
  return train;
}

}  // namespace bough

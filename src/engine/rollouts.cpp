#include "engine/rollouts.h"

#include "base/error.h"

namespace bough {

Trajectory to_rollout(const GenerationResult& result, size_t index, const std::string& group) {
  BOUGH_CHECK(index < result.samples.size(), "sample ", index, " of ", result.samples.size());
  const GeneratedSample& sample = result.samples[index];
  const size_t prompt_length = result.prompt_ids.size();
  Trajectory rollout;
  rollout.group = group;
  rollout.temperature = result.temperature;
  rollout.input_ids = result.prompt_ids;
  rollout.input_ids.insert(rollout.input_ids.end(), sample.token_ids.begin(), sample.token_ids.end());
  rollout.loss_mask.assign(prompt_length, 0);
  rollout.loss_mask.resize(rollout.input_ids.size(), 1);
  rollout.logprobs.assign(prompt_length, 0.0f);
  for (const double log_prob : sample.logprobs) rollout.logprobs.push_back(static_cast<float>(log_prob));
  rollout.versions.assign(prompt_length, -1);
  rollout.versions.insert(rollout.versions.end(), sample.versions.begin(), sample.versions.end());
  rollout.page_choices = sample.page_choices;
  rollout.routed_experts = sample.routed_experts;
  if (!sample.top_ids.empty()) {
    rollout.top_ids.resize(prompt_length);
    rollout.top_ids.insert(rollout.top_ids.end(), sample.top_ids.begin(), sample.top_ids.end());
    rollout.top_logprobs.resize(prompt_length);
    rollout.top_logprobs.insert(rollout.top_logprobs.end(), sample.top_logprobs.begin(),
                                sample.top_logprobs.end());
  }
  rollout.finish_reason = finish_reason_name(sample.finish_reason);
  return rollout;
}

std::vector<Trajectory> to_rollouts(const GenerationResult& result, const std::string& group) {
  std::vector<Trajectory> rollouts;
  for (size_t i = 0; i < result.samples.size(); ++i) {
    Trajectory& rollout = rollouts.emplace_back(to_rollout(result, i, group));
    const GeneratedSample& sample = result.samples[i];
    if (!sample.raw_logprobs.empty()) rollout.columns["raw_logprobs"] = sample.raw_logprobs;
    if (!sample.sampling_logprobs.empty()) rollout.columns["truncated_logprobs"] = sample.sampling_logprobs;
  }
  return rollouts;
}

}  // namespace bough

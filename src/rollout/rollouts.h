// From what an engine returned to lines of a rollout file (data/rollout_file.h).
#pragma once

#include <string>
#include <vector>

#include "rollout/engine.h"
#include "data/rollout_file.h"

namespace bough {

// Sample `index` of a result: prompt with mask 0, then the response with mask 1, its log-probabilities and
// versions. `extra` gets finish_reason, raw_logprobs and
// truncated_logprobs (one for each response token). No reward.
Trajectory to_rollout(const GenerationResult& result, size_t index, const std::string& group);

// All samples, in order.
std::vector<Trajectory> to_rollouts(const GenerationResult& result, const std::string& group);

}  // namespace bough

// Converts the results of an engine to trajectories.
#pragma once

#include <string>
#include <vector>

#include "data/trajectory.h"
#include "engine/engine.h"

namespace bough {

// Makes a trajectory of sample `index` of a result: prompt with mask 0, then the response with mask 1, its
// log-probabilities, versions and finish_reason. No reward. group: the trajectory's group name.
Trajectory to_rollout(const GenerationResult& result, size_t index, const std::string& group);

// Makes trajectories of all samples, in order, with two more columns for the responses: raw_logprobs, and
// truncated_logprobs (GeneratedSample::sampling_logprobs). These columns are for analysis of the sampling and
// not for training. They double the size of a rollout file.
std::vector<Trajectory> to_rollouts(const GenerationResult& result, const std::string& group);

}  // namespace bough

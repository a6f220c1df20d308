// The user's filter of groups: the setting `filter`, a Python function in worker processes.
//
//   def keep(prompt, answer, samples, **fields) -> bool
//
// Each sample is a dict: completion, reward (None where it could not be had), rewards (of named ones, before
// their weights), tokens, truncated. `fields` are those of the problem's record. Processes, time limits,
// retries and messages are those of a reward of this kind (process_reward.h).
#pragma once

#include <memory>
#include <span>
#include <string>

#include "env/reward.h"

namespace bough {

struct FilterVerdict {
  bool keeps = true;
  std::string error;  // why there is none; else empty
};

class GroupFilter {
 public:
  // Blocks until every worker is ready. UserError: no such file or function, or it cannot be loaded.
  GroupFilter(const std::string& specification, const RewardSettings& settings);

  // From any thread. `samples`: of one prompt, with their rewards.
  FilterVerdict judge(const Problem& problem, std::span<const Trajectory> samples);
  void cancel() { function_->cancel(); }  // as RewardFunction's

 private:
  std::unique_ptr<RewardFunction> function_;
};

}  // namespace bough

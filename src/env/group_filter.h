// The user's filter of groups (setting `filter`): a Python function that runs in worker processes.
//
//   def keep(prompt, answer, samples, **fields) -> bool
//
// Each sample is a dict with completion, reward (None if it failed), rewards (named ones, before weighting),
// tokens (count) and truncated. `fields` are the fields of the problem's record. Processes, time limits,
// retries and messages are the same as for a Python reward (process_reward.h).
#pragma once

#include <memory>
#include <span>
#include <string>

#include "env/reward.h"

namespace bough {

struct FilterVerdict {
  bool keeps = true;
  std::string error;  // why the call failed; "" if it did not. `keeps` is false if it failed
};

class GroupFilter {
 public:
  // Blocks until every worker is ready. Throws UserError if the file or function is missing or cannot be
  // loaded.
  GroupFilter(const std::string& specification, const RewardSettings& settings);

  // Thread-safe. `samples` are the samples of one prompt, with their rewards.
  FilterVerdict judge(const Problem& problem, std::span<const Trajectory> samples);
  void cancel() { function_->cancel(); }  // see RewardFunction::cancel

 private:
  std::unique_ptr<RewardFunction> function_;
};

}  // namespace bough

#include "env/reward.h"

#include <algorithm>

#include "base/error.h"
#include "env/python_reward.h"

namespace bough {

VerifierReward::VerifierReward(const RewardSettings& settings)
    : verifier_(settings.verifier), failure_reward_(settings.failure_reward) {}

std::vector<RewardResult> VerifierReward::score_all(std::span<const RewardRequest> requests) {
  std::vector<RewardResult> results;
  results.reserve(requests.size());
  for (const RewardRequest& request : requests) {
    BOUGH_CHECK(request.problem != nullptr, "request ", results.size());
    try {
      const ExactNumber gold = verifier_.gold(request.problem->answer, request.problem->id);
      Verdict verdict = verifier_.verify(request.completion, gold);
      results.push_back({verdict.score, false, std::move(verdict.reason)});
    } catch (const UserError& error) {  // only if check() was not called
      results.push_back(failed_reward(failure_reward_, error.what()));
    }
  }
  return results;
}

void VerifierReward::check(const Dataset& dataset) const {
  for (const Problem& problem : dataset.problems()) {
    verifier_.gold(problem.answer, str(dataset.source(), ": problem ", quoted(problem.id)));
  }
}

std::unique_ptr<RewardFunction> make_reward(const std::string& specification,
                                            const RewardSettings& settings) {
  if (specification.empty()) return std::make_unique<VerifierReward>(settings);
  return std::make_unique<PythonReward>(specification, settings);
}

RewardResult failed_reward(std::optional<double> failure_reward, std::string message) {
  return {failure_reward.value_or(0), true, std::move(message), failure_reward.has_value()};
}

int64_t count_failures(std::span<const RewardResult> results) {
  return std::count_if(results.begin(), results.end(),
                       [](const RewardResult& result) { return result.failed; });
}

}  // namespace bough

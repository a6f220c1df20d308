#include "env/group_filter.h"

#include <utility>

#include "base/error.h"
#include "env/process_reward.h"

namespace bough {

GroupFilter::GroupFilter(const std::string& specification, const RewardSettings& settings) {
  RewardSettings own = settings;
  own.failure_reward.reset();  // a number in place of a failure would count as a verdict
  parse_python_function(specification, "filter", "FILE.py:FUNCTION such as my_filter.py:keep");
  try {
    function_ = make_python_reward(specification, own);
  } catch (const UserError& error) {
    throw UserError(str("setting filter: ", error.what()));
  }
}

// Calls the user's function like a Python reward, with the samples added to the problem's record. The verdict
// is true if the returned number is above 0.
FilterVerdict GroupFilter::judge(const Problem& problem, std::span<const Trajectory> samples) {
  Json list = Json::array();
  for (const Trajectory& sample : samples) {
    Json one = {{"completion", sample.completion.value_or("")},
                {"reward", sample.reward ? Json(*sample.reward) : Json()},
                {"tokens", sample.num_generated()},
                {"truncated", sample.finish_reason == "length"}};
    one["rewards"] = Json::object();
    for (const auto& [name, value] : sample.rewards) one["rewards"][name] = value;
    list.push_back(std::move(one));
  }
  Problem with_samples = problem;
  if (!with_samples.fields.is_object()) with_samples.fields = Json::object();
  with_samples.fields["samples"] = std::move(list);
  const std::string prompt = samples.empty() ? problem.prompt : samples[0].prompt.value_or(problem.prompt);
  const RewardResult result =
      function_->score({.prompt = prompt, .completion = "", .problem = &with_samples});
  if (result.failed) return {.keeps = false, .error = result.message};
  return {.keeps = result.reward > 0, .error = ""};
}

}  // namespace bough

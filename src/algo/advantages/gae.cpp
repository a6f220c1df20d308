#include "algo/advantages/gae.h"

#include "base/error.h"

namespace bough {

GaeResult gae(const GaeInput& input, double gamma, double lambda) {
  const size_t count = input.values.size();
  BOUGH_CHECK(input.rewards.size() == count && input.trained.size() == count &&
                  (input.turns.empty() || input.turns.size() == count),
              "values ", count, ", rewards ", input.rewards.size(), ", mask ", input.trained.size(),
              ", turns ", input.turns.size());
  // The trained tokens of each step, in order.
  std::vector<std::vector<size_t>> steps;
  for (size_t t = 0; t < count; ++t) {
    if (!input.trained[t]) continue;
    const bool goes_on =
        !steps.empty() && !input.turns.empty() && input.turns[steps.back().back()] == input.turns[t];
    if (!goes_on) steps.emplace_back();
    steps.back().push_back(t);
  }
  GaeResult result{std::vector<double>(count, 0.0), {input.values.begin(), input.values.end()}};
  double next_value = 0, next_advantage = 0;
  if (input.truncated && !steps.empty()) next_value = input.values[steps.back().back()];
  for (size_t k = steps.size(); k-- > 0;) {
    const double value = input.values[steps[k].front()];
    double reward = 0;
    for (const size_t t : steps[k]) reward += input.rewards[t];
    next_advantage = reward + gamma * next_value - value + gamma * lambda * next_advantage;
    next_value = value;
    for (const size_t t : steps[k]) {
      result.advantages[t] = next_advantage;
      result.returns[t] = next_advantage + value;
    }
  }
  return result;
}

}  // namespace bough

#include "algo/advantages.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "algo/advantages/estimators.h"
#include "algo/groups.h"
#include "algo/reward_shaping.h"
#include "base/error.h"

namespace bough {

namespace {

struct NamedEstimator {
  const char* name;
  EstimatorKind (*make)();
};
#define BOUGH_LIST_ESTIMATOR(name) {#name, name##_estimator},
constexpr NamedEstimator kEstimators[] = {BOUGH_ADVANTAGES(BOUGH_LIST_ESTIMATOR)};
#undef BOUGH_LIST_ESTIMATOR

EstimatorKind find_estimator(const std::string& name) {
  const char* names[std::size(kEstimators)];
  std::string known;
  for (size_t i = 0; i < std::size(kEstimators); ++i) {
    if (name == kEstimators[i].name) return kEstimators[i].make();
    names[i] = kEstimators[i].name;
    known += str(i ? ", " : "", names[i]);
  }
  const std::string near = nearest(name, std::begin(names), std::end(names));
  throw UserError(str("setting adv_estimator: unknown estimator ", quoted(name), ", expected one of ", known,
                      near.empty() ? "" : str("; did you mean '", near, "'?")));
}

}  // namespace

std::vector<std::string> estimator_names() {
  std::vector<std::string> names;
  for (const NamedEstimator& known : kEstimators) names.emplace_back(known.name);
  return names;
}

void AdvantageSettings::check() const {
  if (adv_estimator != "grpo" && (mean_level != "auto" || std_level != "auto"))
    throw UserError(str("mean_level and std_level belong to adv_estimator grpo, got ", adv_estimator,
                        "; leave them out"));
  if (!needs_steps() && (adv_norm.mean_level != "auto" || adv_norm.std_level != "auto"))
    throw UserError(
        str("adv_norm belongs to adv_estimator gae and turn_returns, got ", adv_estimator, "; leave it out"));
}

bool AdvantageSettings::needs_values() const {
  return find_estimator(adv_estimator).needs_values;
}
bool AdvantageSettings::needs_steps() const {
  return find_estimator(adv_estimator).needs_steps;
}
bool AdvantageSettings::needs_baselines() const {
  return find_estimator(adv_estimator).needs_baselines;
}
bool AdvantageSettings::takes_kl_rewards() const {
  return find_estimator(adv_estimator).takes_kl_rewards;
}

std::vector<std::vector<double>> compute_advantages(const AdvantageSettings& settings,
                                                    const AdvantageInput& batch,
                                                    std::vector<std::vector<double>>* returns) {
  const size_t count = batch.rewards.size();
  BOUGH_CHECK(batch.groups.size() == count, "groups ", batch.groups.size(), ", rewards ", count);
  BOUGH_CHECK(batch.tokens.empty() || batch.tokens.size() == count, "tokens ", batch.tokens.size(),
              ", rewards ", count);
  BOUGH_CHECK(batch.parts.empty() || batch.parts.size() == count, "parts ", batch.parts.size(), ", rewards ",
              count);
  const EstimatorKind kind = find_estimator(settings.adv_estimator);
  settings.check();
  BOUGH_CHECK(!kind.needs_steps || batch.steps.size() == count, "steps ", batch.steps.size(), ", rewards ",
              count);
  BOUGH_CHECK(!kind.needs_baselines || batch.baselines.size() == count, "baselines ", batch.baselines.size(),
              ", rewards ", count);
  BOUGH_CHECK(batch.kl_rewards.empty() || (kind.takes_kl_rewards && batch.kl_rewards.size() == count),
              "kl_rewards ", batch.kl_rewards.size(), ", rewards ", count);
  check_finite(batch.rewards);
  check_finite(batch.baselines);
  for (const std::vector<double>& own : batch.kl_rewards) check_finite(own);
  const std::vector<int64_t> ones(batch.tokens.empty() ? count : 0, 1);
  AdvantageInput complete = batch;
  if (batch.tokens.empty()) complete.tokens = ones;
  const std::vector<std::vector<int64_t>> groups = members_by_group(batch.groups);
  return kind.estimate({settings, complete, groups, returns});
}

std::vector<double> EstimatorInput::by_group(std::span<const double> rewards, Estimate estimate) const {
  std::vector<double> out(rewards.size());
  std::vector<double> values;
  std::vector<int64_t> tokens;
  for (const std::vector<int64_t>& members : groups) {
    values.clear();
    tokens.clear();
    for (const int64_t s : members) {
      values.push_back(rewards[static_cast<size_t>(s)]);
      tokens.push_back(batch.tokens[static_cast<size_t>(s)]);
    }
    estimate(settings, values, tokens);
    for (size_t i = 0; i < members.size(); ++i) out[static_cast<size_t>(members[i])] = values[i];
  }
  return out;
}

double mean_of(std::span<const double> values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return values.empty() ? 0.0 : sum / static_cast<double>(values.size());
}

double deviation_of(std::span<const double> values, bool unbiased) {
  if (values.size() < 2) return 0.0;
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  if (*low == *high) return 0.0;
  const double mean = mean_of(values);
  double squares = 0.0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return std::sqrt(squares / (static_cast<double>(values.size()) - (unbiased ? 1.0 : 0.0)));
}

void normalize_group(const AdvantageSettings& settings, std::vector<double>& values,
                     const std::vector<int64_t>&) {
  if (values.size() == 1) {
    values[0] /= 1.0 + settings.eps;
    return;
  }
  const double deviation = deviation_of(values, settings.std_unbiased);
  if (deviation == 0.0) {
    std::fill(values.begin(), values.end(), 0.0);
    return;
  }
  const double mean = mean_of(values), scale = 1.0 / (deviation + settings.eps);
  for (double& value : values) value = (value - mean) * scale;
}

Advantages one_a_sequence(const std::vector<double>& values) {
  Advantages advantages;
  for (const double value : values) advantages.push_back({value});
  return advantages;
}

Whitening whitening(const AdvantageNormSettings& settings, bool by_default) {
  const auto is_on = [&](const std::string& level) {
    return level == "batch" || (level == "auto" && by_default);
  };
  return {is_on(settings.mean_level), is_on(settings.std_level)};
}

void whiten(Advantages& advantages, std::span<const int64_t> tokens, Whitening parts) {
  constexpr double kEps = 1e-8;
  // An entry with a single value stands for `tokens` tokens.
  const auto weight = [&](size_t s) {
    return advantages[s].size() == 1 ? static_cast<double>(tokens[s]) : 1.0;
  };
  double count = 0, sum = 0, squares = 0;
  for (size_t s = 0; s < advantages.size(); ++s)
    for (const double value : advantages[s]) count += weight(s), sum += weight(s) * value;
  const double mean = count > 0 ? sum / count : 0.0;
  double low = INFINITY, high = -INFINITY;
  for (size_t s = 0; s < advantages.size(); ++s)
    for (const double value : advantages[s]) {
      squares += weight(s) * (value - mean) * (value - mean);
      if (weight(s) > 0) low = std::min(low, value), high = std::max(high, value);
    }
  // Equal advantages, or a single one, become exactly 0. If the mean is not subtracted, they stay unchanged,
  // because their deviation is 0.
  const double center = parts.subtracts_mean ? mean : 0.0;
  double scale = low < high || !parts.subtracts_mean ? 1.0 : 0.0;
  if (low < high && parts.divides_by_deviation) scale = 1.0 / std::sqrt(squares / (count - 1.0) + kEps);
  for (auto& list : advantages)
    for (double& value : list) value = (value - center) * scale;
}

}  // namespace bough

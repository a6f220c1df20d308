#include "algo/filters.h"

#include <algorithm>
#include <limits>
#include <set>

#include "algo/groups.h"
#include "base/error.h"

namespace bough {

namespace {

// The keep_samples entries of `samples` with the highest reward or acceptance, as keep_samples_by says. On
// ties, the earlier entry is kept.
std::vector<int64_t> best_of(const FilterSettings& settings, const FilterInput& input,
                             std::vector<int64_t> samples) {
  const auto count = static_cast<size_t>(settings.keep_samples);
  if (samples.size() <= count) return samples;
  const std::span<const double> score = settings.needs_acceptance() ? input.acceptance : input.rewards;
  std::stable_sort(samples.begin(), samples.end(), [&](int64_t a, int64_t b) { return score[a] > score[b]; });
  samples.resize(count);
  return samples;
}

// `groups`: for each group, the candidate samples in the order in which they were sampled.
std::vector<KeptByWidth> kept_by_width(const FilterSettings& settings, const FilterInput& input,
                                       const std::vector<std::vector<int64_t>>& groups) {
  int64_t narrowest = std::numeric_limits<int64_t>::max();
  for (const auto& members : groups) narrowest = std::min(narrowest, std::ssize(members));
  const int64_t n = settings.keep_samples;
  if (n == 0 || groups.empty() || narrowest < n) return {};
  std::set<int64_t> widths = {n, n + n / 2, 2 * n, 3 * n, narrowest};
  std::vector<KeptByWidth> out;
  for (const int64_t width : widths) {
    if (width > narrowest) break;
    double reward = 0, acceptance = 0, count = 0;
    for (const auto& members : groups)
      for (const int64_t s : best_of(settings, input, {members.begin(), members.begin() + width})) {
        reward += input.rewards[s];
        if (!input.acceptance.empty()) acceptance += input.acceptance[s];
        ++count;
      }
    out.push_back({width, reward / count, {}});
    if (!input.acceptance.empty()) out.back().acceptance = acceptance / count;
  }
  return out;
}

void check_input(const FilterSettings& settings, const FilterInput& input) {
  const std::string &how = settings.truncated_samples, &by = settings.keep_samples_by;
  if (how != "keep" && how != "mask" && how != "drop")
    throw UserError(str("setting truncated_samples: got ", quoted(how), ", expected keep, mask or drop"));
  if (by != "reward" && by != "acceptance")
    throw UserError(str("setting keep_samples_by: got ", quoted(by), ", expected reward or acceptance"));
  const size_t size = input.groups.size();
  const auto fits = [&](const auto& list, bool may_be_empty) {
    return list.size() == size || (may_be_empty && list.empty());
  };
  BOUGH_CHECK(fits(input.rewards, false) && fits(input.truncated, false) && fits(input.valid, true) &&
                  fits(input.stale, true) && fits(input.acceptance, !settings.needs_acceptance()),
              "rewards ", input.rewards.size(), ", groups ", size, ", truncated ", input.truncated.size(),
              ", valid ", input.valid.size(), ", stale ", input.stale.size(), ", acceptance ",
              input.acceptance.size());
}

}  // namespace

void FilterSettings::check() const {
  if (keep_samples_by == "acceptance" && keep_samples == 0)
    throw UserError(
        "keep_samples_by is acceptance, but keep_samples is 0 (all samples are kept); expected "
        "keep_samples above 0 and below gconfig.n_samples");
  if (needs_acceptance() && dynamic_sampling)
    throw UserError(
        "keep_samples_by is acceptance with dynamic_sampling, which compares the rewards of a group before "
        "the acceptance of its samples is known; leave out one of them");
}

FilterResult filter_sequences(const FilterSettings& settings, const FilterInput& input) {
  check_input(settings, input);
  const std::string& how = settings.truncated_samples;
  FilterResult result;
  result.kept.assign(input.groups.size(), 1);
  std::vector<std::vector<int64_t>> choices;
  for (const std::vector<int64_t>& members : members_by_group(input.groups)) {
    std::vector<int64_t> left;
    for (const int64_t s : members) {
      const bool is_valid = input.valid.empty() || input.valid[s];
      const bool cut = is_valid && input.truncated[s] && how == "drop";
      result.truncated += is_valid && input.truncated[s];
      result.truncated_dropped += cut;
      if (cut || !is_valid) result.kept[s] = 0;
      else left.push_back(s);
    }
    const size_t dropped = members.size() - left.size();
    if (settings.keep_samples > 0 && std::ssize(left) > settings.keep_samples) {
      choices.push_back(left);
      for (const int64_t s : left) result.kept[s] = 0;
      left = best_of(settings, input, left);
      for (const int64_t s : left) result.kept[s] = 1;
      result.surplus_dropped += std::ssize(choices.back()) - settings.keep_samples;
    }
    const bool equal = left.size() > 1 && std::all_of(left.begin(), left.end(), [&](int64_t s) {
                         return input.rewards[s] == input.rewards[left[0]];
                       });
    result.zero_std_groups += equal;
    const bool no_baseline = dropped > 0 && left.size() < 2;
    const bool is_stale = !input.stale.empty() && std::any_of(members.begin(), members.end(),
                                                              [&](int64_t s) { return input.stale[s]; });
    result.stale_groups += is_stale;
    if (is_stale || (equal && settings.dynamic_sampling) || no_baseline) {
      ++result.groups_dropped;
      for (const int64_t s : left) result.kept[s] = 0;
    }
  }
  result.by_width = kept_by_width(settings, input, choices);
  result.trained = result.kept;
  for (size_t s = 0; s < input.groups.size(); ++s) {
    result.sequences_dropped += result.kept[s] == 0;
    if (how != "mask" || !input.truncated[s] || !result.kept[s]) continue;
    result.trained[s] = 0;
    ++result.truncated_masked;
  }
  return result;
}

}  // namespace bough

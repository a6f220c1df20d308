#include "algo/filters.h"

#include <algorithm>

#include "algo/groups.h"
#include "base/error.h"

namespace bough {

FilterResult filter_sequences(const FilterSettings& settings, std::span<const double> rewards,
                              std::span<const int64_t> groups, std::span<const uint8_t> truncated,
                              std::span<const uint8_t> valid, std::span<const uint8_t> stale) {
  const std::string& how = settings.truncated_samples;
  if (how != "keep" && how != "mask" && how != "drop")
    throw UserError(str("setting truncated_samples: got ", quoted(how), ", expected keep, mask or drop"));
  BOUGH_CHECK(rewards.size() == groups.size() && truncated.size() == groups.size() &&
                  (valid.empty() || valid.size() == groups.size()) &&
                  (stale.empty() || stale.size() == groups.size()),
              "rewards ", rewards.size(), ", groups ", groups.size(), ", truncated ", truncated.size(),
              ", valid ", valid.size(), ", stale ", stale.size());
  FilterResult result;
  result.kept.assign(groups.size(), 1);
  for (const std::vector<int64_t>& members : members_by_group(groups)) {
    std::vector<int64_t> left;
    for (const int64_t s : members) {
      const bool is_valid = valid.empty() || valid[s];
      const bool cut = is_valid && truncated[s] && how == "drop";
      result.truncated += is_valid && truncated[s];
      result.truncated_dropped += cut;
      if (cut || !is_valid) result.kept[s] = 0;
      else left.push_back(s);
    }
    const size_t dropped = members.size() - left.size();
    if (settings.keep_samples > 0 && std::ssize(left) > settings.keep_samples) {
      std::stable_sort(left.begin(), left.end(),
                       [&](int64_t a, int64_t b) { return rewards[a] > rewards[b]; });
      for (size_t i = static_cast<size_t>(settings.keep_samples); i < left.size(); ++i)
        result.kept[left[i]] = 0;
      result.surplus_dropped += std::ssize(left) - settings.keep_samples;
      left.resize(static_cast<size_t>(settings.keep_samples));
    }
    const bool equal = left.size() > 1 && std::all_of(left.begin(), left.end(), [&](int64_t s) {
                         return rewards[s] == rewards[left[0]];
                       });
    result.zero_std_groups += equal;
    const bool no_baseline = dropped > 0 && left.size() < 2;
    const bool is_stale =
        !stale.empty() && std::any_of(members.begin(), members.end(), [&](int64_t s) { return stale[s]; });
    result.stale_groups += is_stale;
    if (is_stale || (equal && settings.dynamic_sampling) || no_baseline) {
      ++result.groups_dropped;
      for (const int64_t s : left) result.kept[s] = 0;
    }
  }
  result.trained = result.kept;
  for (size_t s = 0; s < groups.size(); ++s) {
    result.sequences_dropped += result.kept[s] == 0;
    if (how != "mask" || !truncated[s] || !result.kept[s]) continue;
    result.trained[s] = 0;
    ++result.truncated_masked;
  }
  return result;
}

}  // namespace bough

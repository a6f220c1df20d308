// Lists the sequences of each group of samples.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace bough {

// groups [S]: the group id of each sequence. Returns for each distinct id its sequence indices, ascending.
// The ids are in order of first appearance.
inline std::vector<std::vector<int64_t>> members_by_group(std::span<const int64_t> groups) {
  std::vector<std::vector<int64_t>> members;
  std::unordered_map<int64_t, size_t> slot_of;
  for (size_t s = 0; s < groups.size(); ++s) {
    const auto [it, added] = slot_of.try_emplace(groups[s], members.size());
    if (added) members.emplace_back();
    members[it->second].push_back(static_cast<int64_t>(s));
  }
  return members;
}

}  // namespace bough

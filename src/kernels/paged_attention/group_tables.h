// Page tables of samples that use the same pages for their common prompt, for tests of plans over pages.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/paged_attention/paged_plan.h"

namespace bough {

// Returns the page tables of `samples` samples for each of `groups` prompts. A prompt has `shared` pages,
// which all its samples list. Each sample then lists `own` more pages.
inline std::vector<std::vector<int32_t>> group_tables(int groups, int samples, int shared, int own) {
  std::vector<std::vector<int32_t>> tables;
  int32_t next = 0;
  for (int g = 0; g < groups; ++g) {
    std::vector<int32_t> prompt;
    for (int p = 0; p < shared; ++p) prompt.push_back(next++);
    for (int s = 0; s < samples; ++s) {
      tables.push_back(prompt);
      for (int p = 0; p < own; ++p) tables.back().push_back(next++);
    }
  }
  return tables;
}

// Returns a decode pass: one token of each table's sequence, the token at place 11 of the last page.
inline std::vector<PagedSegment> last_tokens(const std::vector<std::vector<int32_t>>& tables) {
  std::vector<PagedSegment> segments;
  for (const auto& table : tables)
    segments.push_back({table, static_cast<int64_t>(table.size()) * 16 - 5, 1});
  return segments;
}

}  // namespace bough

#include "kernels/page_choice/sparse_policy.h"

#include <algorithm>
#include <iterator>
#include <unordered_set>

#include "base/error.h"

namespace bough {

BlockSummary block_summary(const std::string& name) {
  if (name == "mean") return BlockSummary::kMean;
  if (name == "minmax") return BlockSummary::kMinMax;
  BOUGH_CHECK(name == "exact", "block summary: got ", name, ", expected mean, minmax or exact");
  return BlockSummary::kExact;
}

int64_t SparsePolicy::budget_of(int64_t context_tokens) const {
  const auto next = larger_budgets.upper_bound(context_tokens);
  return next == larger_budgets.begin() ? budget_blocks : std::prev(next)->second;
}

namespace {
void append_parts(const SparsePolicy& policy, std::span<const int32_t> pages, int64_t block,
                  std::vector<int32_t>& parts) {
  for (int64_t i = 0; i < policy.parts_per_block(); ++i)
    parts.push_back(policy.part_at(pages, block * policy.block_tokens + i * policy.part_tokens()));
}
}  // namespace

std::vector<int32_t> completed_blocks(std::span<const PagedSegment> segments, const SparsePolicy& policy) {
  std::vector<int32_t> parts;
  for (const PagedSegment& segment : segments) {
    const int64_t end = (segment.begin + segment.count) / policy.block_tokens;
    for (int64_t block = segment.begin / policy.block_tokens; block < end; ++block)
      append_parts(policy, segment.pages, block, parts);
  }
  return parts;
}

std::vector<int32_t> complete_blocks(std::span<const PagedSegment> segments, const SparsePolicy& policy) {
  std::vector<int32_t> parts;
  std::unordered_set<int32_t> known;  // last parts
  for (const PagedSegment& segment : segments) {
    // If a block is known, all earlier blocks of the sequence are known too.
    int64_t block = (segment.begin + segment.count) / policy.block_tokens;
    while (block > 0 && known.insert(policy.last_part(segment.pages, block - 1)).second)
      append_parts(policy, segment.pages, --block, parts);
  }
  return parts;
}

void PagesOfBlocks::set(std::span<const int32_t> blocks, int64_t num_pages, const SparsePolicy& policy) {
  pages.clear();
  masks.clear();
  if (policy.block_tokens >= kPageTokens) {
    const int64_t pages_per_block = policy.parts_per_block();
    for (const int64_t block : blocks)
      for (int64_t page = block * pages_per_block; page < std::min((block + 1) * pages_per_block, num_pages);
           ++page)
        pages.push_back(static_cast<int32_t>(page));
    return;
  }
  const auto part = static_cast<uint32_t>((1 << policy.block_tokens) - 1);
  for (const int32_t block : blocks) {
    const auto page = static_cast<int32_t>(block / policy.parts_per_page());
    if (pages.empty() || pages.back() != page) {
      pages.push_back(page);
      masks.push_back(0);
    }
    masks.back() |= static_cast<uint16_t>(part << block % policy.parts_per_page() * policy.block_tokens);
  }
}

}  // namespace bough

#include "plan/indexed_tree.h"

#include <numeric>

#include "base/error.h"
#include "base/large_pages.h"

namespace bough {

std::vector<int64_t> all_sequences(const PlanRequest& request) {
  std::vector<int64_t> indices(request.sequences.size());
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

namespace {

// Of each tree token, how many sequences train it. offsets: of all the batch's sequences.
std::vector<int32_t> trained_counts(const PrefixTree& tree, const std::vector<int64_t>& sequences,
                                    const PlanRequest& request, const std::vector<int64_t>& offsets) {
  std::vector<int32_t> counts(tree.num_tokens(), 0);
  BOUGH_CHECK(offsets.back() == static_cast<int64_t>(request.trained.size()), "the batch has ",
              offsets.back(), " tokens, but ", request.trained.size(), " flags say what trains");
  for (size_t i = 0; i < sequences.size(); ++i) {
    const uint8_t* own = request.trained.data() + offsets[sequences[i]];
    // From the end to the root, a run of consecutive numbers at a time.
    for (int32_t t = tree.sequence_end[i]; t >= 0;) {
      const int32_t begin = tree.chain_begin[t];
      const int32_t shift = tree.depth[begin] - begin;
      for (; t >= begin; --t) counts[t] += own[t + shift] != 0;
      t = tree.parent[begin];
    }
  }
  return counts;
}

}  // namespace

IndexedTree index_tree(PrefixTree tree, std::vector<int64_t> sequences, const PlanRequest& request,
                       const PrefixTree* whole) {
  IndexedTree indexed{nullptr, std::move(sequences), BranchTree(tree), nullptr};
  std::vector<int32_t> counts;
  if (!request.trained.empty())
    counts = trained_counts(tree, indexed.sequences, request, (whole ? *whole : tree).sequence_offset);
  const std::vector<int32_t>& trained = request.trained.empty() ? tree.num_sequences : counts;
  const int64_t count = tree.num_tokens();
  indexed.before = std::make_unique_for_overwrite<IndexedTree::Sums[]>(count + 1);
  ask_for_large_pages(indexed.before.get(), (count + 1) * sizeof(IndexedTree::Sums));
  IndexedTree::Sums sums{0, 0, 0, 0};
  indexed.before[0] = sums;
  for (int64_t t = 0; t < count; ++t) {
    const int32_t parent = tree.parent[t];
    const int32_t rows = parent < 0 ? 0 : trained[t];  // a sequence's first token never trains
    sums.pairs += tree.depth[t] + 1;
    sums.rows += rows;
    sums.trained += rows > 0;
    sums.starts += parent != t - 1 || t == 0;
    indexed.before[t + 1] = sums;
  }
  indexed.tree = std::make_shared<const PrefixTree>(std::move(tree));
  return indexed;
}

}  // namespace bough

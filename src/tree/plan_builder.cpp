#include "tree/plan_builder.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "tree/large_pages.h"

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

PlanBuilder::PlanBuilder(const IndexedTree& indexed, int64_t max_tokens_per_pass)
    : indexed_(indexed), limit_(max_tokens_per_pass) {
  planned_.tree = indexed.tree;
  planned_.sequences = indexed.sequences;
}

void PlanBuilder::add_run(int32_t begin, int32_t end, bool is_leaf) {
  const int64_t count = end - begin;
  const int64_t num_chunks = (count + limit_ - 1) / limit_;
  for (int64_t i = 0; i < num_chunks; ++i) {
    const TokenRange range{static_cast<int32_t>(begin + count * i / num_chunks),
                           static_cast<int32_t>(begin + count * (i + 1) / num_chunks)};
    if (is_leaf && i == num_chunks - 1) add_leaf({range});
    else push(range);
  }
}

void PlanBuilder::add_leaf(std::vector<TokenRange> ranges) {
  const int32_t block = add_block(false, std::move(ranges));
  planned_.steps.push_back({Step::Kind::kForwardBackward, block});
}

void PlanBuilder::close_to(size_t count) {
  while (open_.size() > count) {
    const int32_t block = open_.back();
    open_.pop_back();
    stack_rows_ -= planned_.blocks[block].num_tokens;
    planned_.steps.push_back({Step::Kind::kBackward, block});
  }
}

PlannedTree PlanBuilder::finish() {
  close_to(0);
  return std::move(planned_);
}

void PlanBuilder::push(TokenRange range) {
  const int32_t block = add_block(true, {range});
  planned_.steps.push_back({Step::Kind::kForward, block});
  open_.push_back(block);
  stack_rows_ += range.size();
  planned_.stack_capacity = std::max(planned_.stack_capacity, stack_rows_);
}

int32_t PlanBuilder::add_block(bool interior, std::vector<TokenRange> ranges) {
  const auto& tree = *indexed_.tree;
  Block block;
  block.interior = interior;
  block.above = top();
  block.stack_rows = stack_rows_;
  block.needed = false;
  for (const auto& range : ranges) {
    block.num_tokens += range.size();
    block.num_pairs += indexed_.num_pairs(range);
    block.num_head_rows += indexed_.num_trained(range);
    block.num_loss_rows += indexed_.num_rows(range);
    block.num_pieces += indexed_.num_pieces(range);
    // Each subtree of the range hangs off the stack: its tokens see all rows down to there.
    for (int32_t t = range.begin, end; t < range.end; t = end) {
      end = std::min(tree.subtree_end[t], range.end);
      block.num_stack_pairs += int64_t{end - t} * tree.depth[t];
    }
    // Of a leaf block all that can train lies in it; of an interior one below its first token.
    const int32_t end = interior ? tree.subtree_end[range.begin] : range.end;
    block.needed |= indexed_.num_trained({range.begin, end}) > 0;
  }
  if (interior) {
    // A token's hidden state leaves the block through each child that trains and lies elsewhere.
    const auto [begin, end] = ranges.front();
    for (int32_t t = begin; t < end; ++t) {
      bool leaves = false;
      int32_t child = t + 1;
      if (child < end) child = tree.subtree_end[child];  // the block's own continuation
      for (; child < tree.subtree_end[t] && !leaves; child = tree.subtree_end[child])
        leaves = indexed_.trains(child);
      block.num_exits += leaves;
    }
  }
  block.ranges = std::move(ranges);
  planned_.blocks.push_back(std::move(block));
  return static_cast<int32_t>(planned_.blocks.size()) - 1;
}

}  // namespace bough

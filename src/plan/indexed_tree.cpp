#include "plan/indexed_tree.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/large_pages.h"

namespace bough {

// For each tree token, the number of sequences that train it.
std::vector<int32_t> IndexedTree::trained_counts() const {
  const auto& tree = *tree_;
  const auto& offsets = tree.sequence_offset;
  BOUGH_CHECK(offsets.back() == static_cast<int64_t>(request_.trained.size()), "the batch has ",
              offsets.back(), " tokens, but ", request_.trained.size(), " training flags");
  std::vector<int32_t> counts(tree.num_tokens(), 0);
  for (size_t s = 0; s < tree.sequence_end.size(); ++s) {
    const uint8_t* own = request_.trained.data() + offsets[s];
    // Goes from the sequence's end to the root, one run of consecutive token numbers at a time.
    for (int32_t t = tree.sequence_end[s]; t >= 0;) {
      const int32_t begin = tree.chain_begin[t];
      const int32_t shift = tree.depth[begin] - begin;
      for (; t >= begin; --t) counts[t] += own[t + shift] != 0;
      t = tree.parent[begin];
    }
  }
  return counts;
}

IndexedTree::IndexedTree(const PlanRequest& request)
    : request_(request),
      tree_(std::make_shared<const PrefixTree>(build_prefix_tree(request.sequences))),
      branches_(*tree_) {
  const auto& tree = *tree_;
  std::vector<int32_t> counts;
  if (!request.trained.empty()) counts = trained_counts();
  const std::vector<int32_t>& trained = request.trained.empty() ? tree.num_sequences : counts;
  const int64_t count = tree.num_tokens();
  before_ = std::make_unique_for_overwrite<Sums[]>(count + 1);
  ask_for_large_pages(before_.get(), (count + 1) * sizeof(Sums));
  Sums sums{0, 0, 0, 0};
  before_[0] = sums;
  for (int64_t t = 0; t < count; ++t) {
    const int32_t parent = tree.parent[t];
    const int32_t rows = parent < 0 ? 0 : trained[t];  // a sequence's first token never trains
    sums.pairs += tree.depth[t] + 1;
    sums.rows += rows;
    sums.trained += rows > 0;
    sums.starts += parent != t - 1 || t == 0;
    before_[t + 1] = sums;
  }
}

std::vector<int64_t> IndexedTree::all_sequences() const {
  std::vector<int64_t> indices(request_.sequences.size());
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

const std::vector<int64_t>& IndexedTree::by_end() {
  const auto& end = tree_->sequence_end;
  if (by_end_.size() == end.size()) return by_end_;
  // A key holds the token and the sequence index, so the sort needs no look-up.
  std::vector<uint64_t> keys(end.size());
  for (size_t s = 0; s < end.size(); ++s) keys[s] = static_cast<uint64_t>(end[s] + 1) << 32 | s;
  std::sort(keys.begin(), keys.end());
  by_end_.resize(end.size());
  for (size_t i = 0; i < keys.size(); ++i) by_end_[i] = static_cast<int64_t>(keys[i] & UINT32_MAX);
  return by_end_;
}

void IndexedTree::append_sequences(TokenRange range, std::vector<int64_t>& to) {
  const auto& order = by_end();
  const auto& end = tree_->sequence_end;
  const auto below = [&](int64_t s, int32_t token) { return end[s] < token; };
  auto it = std::lower_bound(order.begin(), order.end(), range.begin, below);
  for (; it != order.end() && end[*it] < range.end; ++it) to.push_back(*it);
}

std::vector<int64_t> IndexedTree::sequences_of(const TreePart& part) {
  std::vector<int64_t> result;
  if (part.path.empty()) append_sequences({-1, 0}, result);
  for (const int32_t node : part.ends) {
    const auto& stretch = branches_.nodes[node];
    append_sequences({stretch.begin, stretch.end}, result);
  }
  for (const int32_t node : part.nodes) append_sequences(subtree(node), result);
  return result;
}

std::vector<IndexedTree::Sums> IndexedTree::path_sums(const TreePart& part) {
  const auto& tree = *tree_;
  const auto& nodes = branches_.nodes;
  const int32_t length = nodes[part.path.back()].depth;
  std::vector<int64_t> rows(length, 0);  // number of sequences that train each token
  if (request_.trained.empty()) {
    for (const int32_t node : part.nodes) rows.back() += tree.num_sequences[nodes[node].begin];
    for (const int32_t node : part.ends) {
      // For each token, adds the number of sequences that end in the token.
      const auto& n = nodes[node];
      int64_t below = 0;
      for (const int32_t child : branches_.children(node)) below += tree.num_sequences[nodes[child].begin];
      for (int32_t t = n.end - 1; t >= n.begin; --t) {
        rows[tree.depth[t]] += tree.num_sequences[t] - below;
        below = tree.num_sequences[t];
      }
    }
    for (int32_t t = length - 1; t > 0; --t) rows[t - 1] += rows[t];
  } else {
    for (const int64_t s : sequences_of(part)) {
      const uint8_t* own = request_.trained.data() + tree.sequence_offset[s];
      const int64_t end = std::min<int64_t>(length, std::ssize(request_.sequences[s]));
      for (int64_t t = 0; t < end; ++t) rows[t] += own[t] != 0;
    }
  }
  std::vector<Sums> sums(length + 1);
  sums[0] = {0, 0, 0, 0};
  for (int32_t t = 0; t < length; ++t) {
    const int64_t own = t == 0 ? 0 : rows[t];  // a sequence's first token never trains
    sums[t + 1] = {sums[t].pairs + t + 1, sums[t].rows + own, sums[t].trained + (own > 0), 1};
  }
  return sums;
}

Block IndexedTree::leaf_block(const TreePart& part) {
  const auto sums = path_sums(part);
  Block block;
  block.num_tokens = std::ssize(sums) - 1;
  block.num_pairs = sums.back().pairs;
  block.num_loss_rows = sums.back().rows;
  block.num_head_rows = sums.back().trained;
  for (const int32_t node : part.nodes) {
    const auto range = subtree(node);
    const auto &first = before(range.begin), &last = before(range.end);
    block.num_tokens += range.size();
    block.num_pairs += last.pairs - first.pairs;
    block.num_loss_rows += last.rows - first.rows;
    block.num_head_rows += last.trained - first.trained;
    block.num_pieces += 1 + last.starts - before(range.begin + 1).starts;
  }
  block.needed = block.num_head_rows > 0;
  block.ranges = {{0, static_cast<int32_t>(block.num_tokens)}};
  return block;
}

void IndexedTree::renumber(const TreePart& roots, PlannedTree& planned) const {
  std::vector<int32_t> starts, shifts;
  int32_t count = 0;
  for (const int32_t root : roots.nodes) {
    const auto range = subtree(root);
    starts.push_back(range.begin);
    shifts.push_back(count - range.begin);
    count += range.size();
  }
  for (auto& block : planned.blocks) {
    std::vector<TokenRange> ranges;
    for (auto range : block.ranges) {
      // One range may cover several roots, which stay adjacent.
      const auto after = std::upper_bound(starts.begin(), starts.end(), range.begin);
      const int32_t shift = shifts[after - starts.begin() - 1];
      range = {range.begin + shift, range.end + shift};
      if (!ranges.empty() && ranges.back().end == range.begin) ranges.back().end = range.end;
      else ranges.push_back(range);
    }
    block.ranges = std::move(ranges);
  }
}

TreeView::TreeView(IndexedTree& whole, const TreePart& part)
    : whole_(&whole), node_(part.nodes.front()), path_(whole.path_sums(part)) {
  const auto stretch = whole.subtree(node_);
  const auto &here = whole.before(stretch.begin), &after = whole.before(stretch.begin + 1);
  // The node continues the path, so it adds no start.
  const auto last = path_.back();
  path_.push_back({last.pairs + after.pairs - here.pairs, last.rows + after.rows - here.rows,
                   last.trained + after.trained - here.trained, last.starts});
  num_path_ = static_cast<int32_t>(path_.size()) - 2;
  shift_ = num_path_ - stretch.begin;
  const auto& own = path_.back();
  base_ = {own.pairs - after.pairs, own.rows - after.rows, own.trained - after.trained,
           own.starts - after.starts};
  end_ = stretch.end + shift_;
}

}  // namespace bough

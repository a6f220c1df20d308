#include "plan/tree_part.h"

#include <algorithm>
#include <numeric>

namespace bough {

TokenRange PartReader::subtree(int32_t node) const {
  const int32_t begin = whole_.branches.nodes[node].begin;
  return {begin, whole_.tree->subtree_end[begin]};
}

const std::vector<int64_t>& PartReader::by_end() {
  const auto& end = whole_.tree->sequence_end;
  if (by_end_.size() == end.size()) return by_end_;
  // One number for token and sequence: sorted without a look at either.
  std::vector<uint64_t> keys(end.size());
  for (size_t s = 0; s < end.size(); ++s) keys[s] = static_cast<uint64_t>(end[s] + 1) << 32 | s;
  std::sort(keys.begin(), keys.end());
  by_end_.resize(end.size());
  for (size_t i = 0; i < keys.size(); ++i) by_end_[i] = static_cast<int64_t>(keys[i] & UINT32_MAX);
  return by_end_;
}

void PartReader::append_sequences(TokenRange range, std::vector<int64_t>& to) {
  const auto& order = by_end();
  const auto& end = whole_.tree->sequence_end;
  const auto below = [&](int64_t s, int32_t token) { return end[s] < token; };
  auto it = std::lower_bound(order.begin(), order.end(), range.begin, below);
  for (; it != order.end() && end[*it] < range.end; ++it) to.push_back(whole_.sequences[*it]);
}

std::vector<int64_t> PartReader::sequences(const TreePart& part) {
  std::vector<int64_t> result;
  if (part.path.empty()) append_sequences({-1, 0}, result);
  for (const int32_t node : part.ends) {
    const auto& stretch = whole_.branches.nodes[node];
    append_sequences({stretch.begin, stretch.end}, result);
  }
  for (const int32_t node : part.nodes) append_sequences(subtree(node), result);
  return result;
}

std::vector<PartReader::Sums> PartReader::path_sums(const TreePart& part) {
  const auto& tree = *whole_.tree;
  const auto& nodes = whole_.branches.nodes;
  const int32_t length = nodes[part.path.back()].depth;
  std::vector<int64_t> rows(length, 0);  // sequences that train each token
  if (request_.trained.empty()) {
    for (const int32_t node : part.nodes) rows.back() += tree.num_sequences[nodes[node].begin];
    for (const int32_t node : part.ends) {
      // Those through a token that do not end below it, token by token.
      const auto& n = nodes[node];
      int64_t below = 0;
      for (const int32_t child : whole_.branches.children(node))
        below += tree.num_sequences[nodes[child].begin];
      for (int32_t t = n.end - 1; t >= n.begin; --t) {
        rows[tree.depth[t]] += tree.num_sequences[t] - below;
        below = tree.num_sequences[t];
      }
    }
    for (int32_t t = length - 1; t > 0; --t) rows[t - 1] += rows[t];
  } else {
    for (const int64_t s : sequences(part)) {
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

TreeView PartReader::view(const TreePart& part) {
  auto sums = path_sums(part);
  const int32_t node = part.nodes.front(), begin = whole_.branches.nodes[node].begin;
  const auto &here = whole_.before[begin], &after = whole_.before[begin + 1];
  // The node follows on from the path: no start.
  const auto& last = sums.back();
  sums.push_back({last.pairs + after.pairs - here.pairs, last.rows + after.rows - here.rows,
                  last.trained + after.trained - here.trained, last.starts});
  return {whole_, node, std::move(sums)};
}

Block PartReader::leaf_block(const TreePart& part) {
  const auto sums = path_sums(part);
  Block block;
  block.num_tokens = std::ssize(sums) - 1;
  block.num_pairs = sums.back().pairs;
  block.num_loss_rows = sums.back().rows;
  block.num_head_rows = sums.back().trained;
  for (const int32_t node : part.nodes) {
    const auto range = subtree(node);
    const auto &begin = whole_.before[range.begin], &end = whole_.before[range.end];
    block.num_tokens += range.size();
    block.num_pairs += end.pairs - begin.pairs;
    block.num_loss_rows += end.rows - begin.rows;
    block.num_head_rows += end.trained - begin.trained;
    block.num_pieces += 1 + end.starts - whole_.before[range.begin + 1].starts;
  }
  block.needed = block.num_head_rows > 0;
  block.ranges = {{0, static_cast<int32_t>(block.num_tokens)}};
  return block;
}

void PartReader::renumber(const TreePart& roots, PlannedTree& planned) const {
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
      // One range may go over several roots, which stay neighbours.
      const auto after = std::upper_bound(starts.begin(), starts.end(), range.begin);
      const int32_t shift = shifts[after - starts.begin() - 1];
      range = {range.begin + shift, range.end + shift};
      if (!ranges.empty() && ranges.back().end == range.begin) ranges.back().end = range.end;
      else ranges.push_back(range);
    }
    block.ranges = std::move(ranges);
  }
}

}  // namespace bough

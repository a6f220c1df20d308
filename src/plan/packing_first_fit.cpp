// First-fit decreasing over sequences, as AReaL packs (areal-tree-training-docs.txt, "Tree Building Process").
#include <algorithm>
#include <bit>
#include <numeric>
#include <set>

#include "plan/packing_internal.h"

namespace bough {

namespace {

// Common prefixes of any two positions of a sorted list, from those of neighbours: minima over powers of two.
class CommonPrefixes {
 public:
  // neighbours[i]: common prefix of positions i - 1 and i.
  explicit CommonPrefixes(std::vector<int32_t> neighbours) : levels_{std::move(neighbours)} {
    for (size_t width = 1; 2 * width <= levels_[0].size(); width *= 2) {
      const auto& narrow = levels_.back();
      std::vector<int32_t> wide(narrow.size() - width);
      for (size_t i = 0; i < wide.size(); ++i) wide[i] = std::min(narrow[i], narrow[i + width]);
      levels_.push_back(std::move(wide));
    }
  }
  int32_t between(int32_t a, int32_t b) const {  // a < b
    const int level = std::bit_width(static_cast<uint32_t>(b - a)) - 1;
    return std::min(levels_[level][a + 1], levels_[level][b + 1 - (1 << level)]);
  }

 private:
  std::vector<std::vector<int32_t>> levels_;
};

// The first of a growing list of sizes, from `from` on, that is at most `limit`: a tree of minima.
class FirstFit {
 public:
  explicit FirstFit(size_t capacity) : width_(std::bit_ceil(std::max<size_t>(capacity, 1))) {
    minima_.assign(2 * width_, INT64_MAX);
  }
  void set(size_t index, int64_t size) {
    minima_[index + width_] = size;
    for (size_t i = (index + width_) / 2; i > 0; i /= 2)
      minima_[i] = std::min(minima_[2 * i], minima_[2 * i + 1]);
  }
  int64_t get(size_t index) const { return minima_[index + width_]; }
  // `width_` or more where there is none.
  size_t find(size_t from, int64_t limit) const {
    if (from >= width_) return width_;
    size_t i = from + width_;
    while (minima_[i] > limit) {
      while (i & 1) i /= 2;  // a right child, or the root: what lies right of it hangs off a node above
      if (i == 0) return width_;
      ++i;
    }
    while (i < width_) i = minima_[2 * i] <= limit ? 2 * i : 2 * i + 1;
    return i - width_;
  }

 private:
  size_t width_;
  std::vector<int64_t> minima_;
};

// Sequences in the tree's order, prefixes before what extends them, and the common prefixes of neighbours.
struct SortedSequences {
  std::vector<int64_t> sequence, length;
  std::vector<int32_t> lcp;
};

SortedSequences sort_sequences(const PrefixTree& tree) {
  SortedSequences sorted;
  for (int64_t s = 0; s < tree.num_sequences_total(); ++s)
    if (tree.sequence_end[s] >= 0) sorted.sequence.push_back(s);
  std::ranges::stable_sort(sorted.sequence, {}, [&](int64_t s) { return tree.sequence_end[s]; });
  int32_t previous = -1;
  for (const int64_t s : sorted.sequence) {
    const int32_t token = tree.sequence_end[s];
    sorted.length.push_back(tree.depth[token] + 1);
    // Up from the later one, chain by chain, to the first token that is not after the earlier one: in pre-order the
    // subtree of that token holds both.
    int32_t up = token;
    while (up > previous) up = tree.chain_begin[up] > previous ? tree.parent[tree.chain_begin[up]] : previous;
    sorted.lcp.push_back(up < 0 ? 0 : tree.depth[up] + 1);
    previous = token;
  }
  return sorted;
}

}  // namespace

Packing pack_first_fit_decreasing(const PrefixTree& tree, int64_t capacity) {
  internal::check_capacity(tree, capacity);
  const auto sorted = sort_sequences(tree);
  const int32_t count = static_cast<int32_t>(sorted.sequence.size());
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, [&](int32_t p) { return std::pair(-sorted.length[p], sorted.sequence[p]); });
  const CommonPrefixes prefixes(sorted.lcp);
  FirstFit sizes(count);
  std::vector<std::set<int32_t>> members;  // positions in the sorted list
  for (const int32_t position : order) {
    const int64_t length = sorted.length[position];
    const int64_t most_shared =
        std::max<int64_t>(sorted.lcp[position], position + 1 < count ? sorted.lcp[position + 1] : 0);
    size_t bin = 0;
    for (;; ++bin) {
      bin = sizes.find(bin, capacity - length + most_shared);
      if (bin >= members.size()) break;
      const auto after = members[bin].lower_bound(position);
      int64_t shared = 0;
      if (after != members[bin].end()) shared = prefixes.between(position, *after);
      if (after != members[bin].begin())
        shared = std::max<int64_t>(shared, prefixes.between(*std::prev(after), position));
      if (sizes.get(bin) + length - shared > capacity) continue;
      sizes.set(bin, sizes.get(bin) + length - shared);
      members[bin].insert(position);
      break;
    }
    if (bin >= members.size()) {
      sizes.set(members.size(), length);
      members.push_back({position});
    }
  }
  Packing packing;
  for (size_t b = 0; b < members.size(); ++b) {
    packing.bins.push_back({{}, sizes.get(b)});
    for (const int32_t position : members[b])
      packing.bins.back().sequences.push_back(sorted.sequence[position]);
    packing.num_tokens += sizes.get(b);
  }
  if (packing.bins.empty() && tree.num_sequences_total() > 0) packing.bins.emplace_back();
  for (int64_t s = 0; s < tree.num_sequences_total(); ++s)
    if (tree.sequence_end[s] < 0) packing.bins[0].sequences.push_back(s);
  for (auto& bin : packing.bins) std::ranges::sort(bin.sequences);
  return packing;
}

}  // namespace bough

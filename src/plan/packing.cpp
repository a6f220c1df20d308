#include "plan/packing.h"

#include <algorithm>
#include <array>
#include <bit>
#include <compare>
#include <functional>
#include <numeric>
#include <set>

#include "base/error.h"
#include "base/format.h"

namespace bough {

namespace internal {

void check_capacity(const PrefixTree& tree, int64_t capacity) {
  if (capacity < 1)
    throw UserError(
        str("max_tokens_per_mb: got ", capacity, ", expected at least 1 token as a tree's capacity"));
  for (int64_t s = 0; s < tree.num_sequences_total(); ++s) {
    const int64_t length = tree.sequence_offset[s + 1] - tree.sequence_offset[s];
    if (length > capacity)
      throw UserError(str("sequence ", s, " of the batch has ", length,
                          " tokens, but a packed tree has at most ", capacity,
                          ": raise max_tokens_per_mb to at least ", length,
                          ", or set tree_training_mode to auto, path or dense, which split long sequences"));
  }
}

Packing to_packing(const BranchTree& branches, std::vector<LeafBin> bins, int64_t capacity) {
  // moves the first leaf to the front
  for (auto& bin : bins) std::ranges::nth_element(bin.leaves, bin.leaves.begin());
  std::ranges::sort(bins, {}, [](const LeafBin& bin) { return bin.leaves.front(); });
  Packing packing;
  packing.bins.resize(bins.size());
  std::vector<int32_t> bin_of_leaf(branches.nodes.size(), -1);
  for (size_t b = 0; b < bins.size(); ++b) {
    BOUGH_CHECK(bins[b].num_tokens <= capacity, "bin ", b, " has ", bins[b].num_tokens, " tokens, capacity ",
                capacity);
    packing.bins[b].num_tokens = bins[b].num_tokens;
    packing.num_tokens += bins[b].num_tokens;
    for (const int32_t leaf : bins[b].leaves) bin_of_leaf[leaf] = static_cast<int32_t>(b);
  }
  if (bins.empty() && !branches.sequence_leaf.empty()) packing.bins.emplace_back();
  for (size_t s = 0; s < branches.sequence_leaf.size(); ++s) {
    const int32_t leaf = branches.sequence_leaf[s];
    const int32_t bin = leaf < 0 ? 0 : bin_of_leaf[leaf];
    BOUGH_CHECK(bin >= 0, "leaf ", leaf, " is in no bin");
    packing.bins[bin].sequences.push_back(static_cast<int64_t>(s));
  }
  return packing;
}

TreeOfSome::TreeOfSome(const BranchTree& branches)
    : branches_(branches),
      last_tree_(branches.nodes.size(), 0),
      last_inner_(branches.nodes.size(), 0),
      reach_(branches.nodes.size(), 0) {}

int32_t TreeOfSome::node_of(int64_t sequence) const {
  const int32_t leaf = branches_.sequence_leaf[sequence], token = branches_.tree().sequence_end[sequence];
  if (leaf < 0 || token >= branches_.nodes[leaf].begin) return leaf;
  const auto after = std::ranges::upper_bound(branches_.nodes, token, {}, &BranchNode::begin);
  return static_cast<int32_t>(after - branches_.nodes.begin()) - 1;
}

}  // namespace internal

namespace {

using internal::LeafBin;

// Bins built bottom-up. A bin's leaves form a linked list, so joining two bins is O(1).
class BestFit {
 public:
  BestFit(const BranchTree& branches, int64_t capacity)
      : branches_(branches),
        capacity_(capacity),
        bins_of_node_(branches.nodes.size()),
        last_(branches.nodes.size()),
        next_(branches.nodes.size(), -1) {
    std::iota(last_.begin(), last_.end(), 0);
  }

  std::vector<LeafBin> run() {
    for (int32_t n = branches_.size() - 1; n >= 0; --n) {
      const auto& node = branches_.nodes[n];
      if (!node.is_leaf()) bins_of_node_[n] = join_children(n, node.depth);
    }
    std::vector<LeafBin> result;
    for (const auto& [size, bin] : join_children(-1, 0)) {
      result.push_back({{}, size});
      for (int32_t leaf = bin; leaf >= 0; leaf = next_[leaf]) result.back().leaves.push_back(leaf);
    }
    return result;
  }

 private:
  // A bin, named by its first leaf, and its token count including the path from the root. Ordered by size; at
  // equal size, later leaves come first.
  struct Bin {
    int64_t size;
    int32_t leaf;
    auto operator<=>(const Bin& other) const {
      return size != other.size ? size <=> other.size : other.leaf <=> leaf;
    }
  };
  using Bins = std::set<Bin>;

  size_t num_bins(int32_t node) const {
    return branches_.nodes[node].is_leaf() ? 1 : bins_of_node_[node].size();
  }

  // Joins bins of the node's children where the result fits, and returns the bins below the node. Joining
  // bins of sizes a and b gives a bin of size a + b - shared. `shared` is the token count of the path down to
  // the node.
  Bins join_children(int32_t node, int64_t shared) {
    const auto children = branches_.children(node);
    if (children.empty()) return {};
    const int32_t largest = *std::ranges::max_element(children, {}, [&](int32_t c) { return num_bins(c); });
    auto bins = std::move(bins_of_node_[largest]);
    if (bins.empty()) bins.insert({branches_.nodes[largest].depth, largest});  // a leaf
    std::vector<Bin> items;
    for (const int32_t child : children) {
      if (child == largest) continue;
      const auto& child_node = branches_.nodes[child];
      if (child_node.is_leaf()) items.push_back({child_node.depth, child});
      items.insert(items.end(), bins_of_node_[child].begin(), bins_of_node_[child].end());
      bins_of_node_[child].clear();
    }
    std::sort(items.rbegin(), items.rend());
    for (const auto& item : items) {
      // Takes the fullest bin with room.
      auto found = bins.upper_bound({capacity_ + shared - item.size, -1});
      if (found == bins.begin()) {
        bins.insert(item);
        continue;
      }
      const auto other = *--found;
      next_[last_[other.leaf]] = item.leaf;
      last_[other.leaf] = last_[item.leaf];
      auto node_handle = bins.extract(found);
      node_handle.value().size = other.size + item.size - shared;
      bins.insert(std::move(node_handle));
    }
    return bins;
  }

  const BranchTree& branches_;
  int64_t capacity_;
  std::vector<Bins> bins_of_node_;  // empty for a leaf, which is its own bin
  std::vector<int32_t> last_;       // last leaf of each bin, by the bin's first leaf
  std::vector<int32_t> next_;       // next leaf of the same bin, by leaf
};

// Orders children by the deepest leaf below them, deepest first.
void sort_deepest_first(BranchTree& branches) {
  std::vector<int32_t> deepest(branches.nodes.size());
  for (int32_t n = branches.size() - 1; n >= 0; --n) {
    const auto& node = branches.nodes[n];
    deepest[n] = std::max(deepest[n], node.depth);
    if (node.parent >= 0) deepest[node.parent] = std::max(deepest[node.parent], deepest[n]);
  }
  for (int32_t n = -1; n < branches.size(); ++n)
    std::ranges::stable_sort(branches.children(n), std::greater(), [&](int32_t c) { return deepest[c]; });
}

// The parts of pack_first_fit_decreasing() below: first-fit decreasing by sequence length, like AReaL's
// packing (areal-tree-training-docs.txt, "Tree Building Process").

// Longest common prefix of any two positions of a sorted list, computed from adjacent ones: a sparse table of
// minima over powers of two.
class CommonPrefixes {
 public:
  // neighbours[i]: length of the common prefix of positions i - 1 and i.
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

// A list of bin sizes that grows at its end, with room for `capacity` sizes. A binary tree of minima finds
// the first size that is at most a limit.
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
  // Returns the first index from `from` on with a size of at most `limit`; `width_` or more if there is none.
  size_t find(size_t from, int64_t limit) const {
    if (from >= width_) return width_;
    size_t i = from + width_;
    while (minima_[i] > limit) {
      while (i & 1) i /= 2;  // a right child or the root: the next nodes to the right hang off an ancestor
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

// Sequences in tree order (prefixes before their extensions), with the common prefixes of adjacent sequences.
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
    // Walks from the end of the later sequence towards the root, one chain (PrefixTree::chain_begin) at a
    // time, to the first token that is not numbered after the end of the earlier sequence. In pre-order, that
    // token's subtree contains both ends.
    int32_t up = token;
    while (up > previous) up = tree.chain_begin[up] > previous ? tree.parent[tree.chain_begin[up]] : previous;
    sorted.lcp.push_back(up < 0 ? 0 : tree.depth[up] + 1);
    previous = token;
  }
  return sorted;
}

Packing pack_single_path_as_trees(const BranchTree& branches, int64_t capacity) {
  Packing packing = pack_single_path(branches.tree(), capacity);
  internal::TreeOfSome trees(branches);
  packing.num_tokens = 0;
  for (auto& bin : packing.bins) {
    bin.num_tokens = 0;
    trees.visit(bin.sequences,
                [&](const BranchNode&, int32_t begin, int32_t end) { bin.num_tokens += end - begin; });
    packing.num_tokens += bin.num_tokens;
  }
  return packing;
}

Packing pack_exactly(const BranchTree& branches, int64_t capacity) {
  const PrefixTree& tree = branches.tree();
  // If no token is computed twice, no packing is better. Then the exact program need not run.
  Packing packing = pack(branches, capacity);
  if (packing.num_tokens == tree.num_tokens()) return packing;
  auto exact = pack_exact(tree, capacity);
  if (!exact)
    throw UserError(
        str("packer: exact finds no packing of these ", tree.num_sequences_total(),
            " sequences into trees of at most ", capacity,
            " tokens in reasonable time, which grows exponentially with the number of sequences; use auto, "
            "which is near the optimum, or smaller mini-batches (ppo_n_minibatches)"));
  return std::move(*exact);
}

struct NamedPacker {
  std::string_view name;
  Packing (*pack)(const BranchTree& branches, int64_t capacity);
};

constexpr std::array kPackers = {
    NamedPacker{"auto", pack},
    NamedPacker{"heuristic", [](const BranchTree& branches,
                                int64_t capacity) { return pack_depth_first(branches.tree(), capacity); }},
    NamedPacker{"first_fit_decreasing",
                [](const BranchTree& branches, int64_t capacity) {
                  return pack_first_fit_decreasing(branches.tree(), capacity);
                }},
    NamedPacker{"single_path", pack_single_path_as_trees},
    NamedPacker{"exact", pack_exactly},
};

constexpr auto kPackerNames = [] {
  std::array<std::string_view, kPackers.size()> names;
  for (size_t i = 0; i < names.size(); ++i) names[i] = kPackers[i].name;
  return names;
}();

}  // namespace

Packing pack(const PrefixTree& tree, int64_t capacity) {
  internal::check_capacity(tree, capacity);
  return pack(BranchTree(tree), capacity);
}

Packing pack(const BranchTree& branches, int64_t capacity) {
  internal::check_capacity(branches.tree(), capacity);
  return internal::to_packing(branches, BestFit(branches, capacity).run(), capacity);
}

Packing pack_depth_first(const PrefixTree& tree, int64_t capacity) {
  internal::check_capacity(tree, capacity);
  BranchTree branches(tree);
  sort_deepest_first(branches);
  std::vector<LeafBin> bins;
  for (const auto& visit : branches.visit()) {
    const int64_t added = visit.length - visit.lcp;
    if (bins.empty() || bins.back().num_tokens + added > capacity)
      bins.push_back({{visit.node}, visit.length});
    else {
      bins.back().leaves.push_back(visit.node);
      bins.back().num_tokens += added;
    }
  }
  return internal::to_packing(branches, std::move(bins), capacity);
}

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

Packing pack_by(std::string_view packer, const BranchTree& branches, int64_t capacity) {
  check_packer("packer", packer);
  return std::ranges::find(kPackers, packer, &NamedPacker::name)->pack(branches, capacity);
}

std::span<const std::string_view> packer_names() {
  return kPackerNames;
}

void check_packer(const std::string& option, std::string_view name) {
  if (std::ranges::find(kPackerNames, name) == kPackerNames.end())
    throw UserError(str(option, ": got ", quoted(name), ", expected ", format_choices(kPackerNames)));
}

}  // namespace bough

#include "plan/packing.h"

#include <algorithm>
#include <compare>
#include <functional>
#include <numeric>
#include <set>

#include "base/error.h"
#include "plan/packing_internal.h"

namespace bough {

namespace internal {

void check_capacity(const PrefixTree& tree, int64_t capacity) {
  if (capacity < 1)
    throw UserError(
        str("max_tokens_per_mb: got ", capacity, ", expected at least 1 token as a tree's capacity"));
  for (int64_t s = 0; s < tree.num_sequences_total(); ++s) {
    const int64_t length = tree.sequence_offset[s + 1] - tree.sequence_offset[s];
    if (length > capacity)
      throw UserError(str("sequence ", s, " of the batch has ", length, " tokens, and a packed tree at most ",
                          capacity, ": raise max_tokens_per_mb to at least ", length,
                          ", or take a plan that cuts paths (tree_training_mode: auto, path or dense)"));
  }
}

Packing to_packing(const BranchTree& branches, std::vector<LeafBin> bins, int64_t capacity) {
  for (auto& bin : bins) std::ranges::nth_element(bin.leaves, bin.leaves.begin());  // the first leaf in front
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

}  // namespace internal

namespace {

using internal::LeafBin;

// Bins that grow bottom-up. A bin's leaves are a linked list, so that joining two is O(1).
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
  // Tokens from the root on, and the bin, by its first leaf. By size, later leaves first of equal ones.
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

  // The bins below a node, those that fit joined. Two bins of sizes a and b become one of a + b - shared.
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
      // The fullest bin with room.
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
  std::vector<Bins> bins_of_node_;  // of a leaf none: it is its own
  std::vector<int32_t> last_;       // leaf of the bin, by its first
  std::vector<int32_t> next_;       // the leaf after each leaf in its bin
};

// Children with the deepest leaf below them first.
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

}  // namespace

Packing pack(const PrefixTree& tree, int64_t capacity) {
  internal::check_capacity(tree, capacity);
  return pack(tree, BranchTree(tree), capacity);
}

Packing pack(const PrefixTree& tree, const BranchTree& branches, int64_t capacity) {
  internal::check_capacity(tree, capacity);
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

double effective_reuse_ratio(const Packing& packing, const PrefixTree& tree) {
  const auto flat = static_cast<double>(tree.num_flat_tokens());
  return flat > 0 ? 1 - static_cast<double>(packing.num_tokens) / flat : 0;
}

}  // namespace bough

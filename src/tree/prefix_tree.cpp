#include "tree/prefix_tree.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "base/large_pages.h"

namespace bough {

namespace {

int64_t common_prefix(TokenSpan a, TokenSpan b, int64_t from) {
  const int64_t limit = static_cast<int64_t>(std::min(a.size(), b.size()));
  int64_t length = from;
  // Compares whole runs: memcmp reads 64 bytes at a time, a loop over tokens only 4.
  constexpr int64_t kRun = 64;
  while (length + kRun <= limit && std::memcmp(&a[length], &b[length], kRun * sizeof(int32_t)) == 0)
    length += kRun;
  while (length < limit && a[length] == b[length]) ++length;
  return length;
}

// Sorts sequence indices lexicographically and finds the longest common prefix (LCP) of adjacent sequences.
// Stable.
// - Method: a merge sort that stores each entry's LCP with the entry before it (Ng and Kakehi 2008), and the
//   first token after this LCP (Bingmann, Eberle and Sanders 2017).
// - No token is compared twice in a merge. Plain comparison sorting would read common prefixes
//   many times.
// - Most comparisons of two entries read no token at all, which avoids a cache miss each.
struct LcpSorter {
  struct Entry {
    int32_t sequence;
    int32_t lcp;   // with the previous entry; 0 for the first entry of a sorted part
    int64_t next;  // the sequence's token at position `lcp`; kEnd if it has none, so a prefix sorts first
  };
  static constexpr int64_t kEnd = INT64_MIN;

  const std::vector<TokenSpan>& sequences;
  std::vector<Entry> sorted, buffer;

  explicit LcpSorter(const std::vector<TokenSpan>& s) : sequences(s), sorted(s.size()), buffer(s.size()) {
    for (size_t i = 0; i < s.size(); ++i) sorted[i] = {static_cast<int32_t>(i), 0, token(i, 0)};
    for (size_t width = 1; width < s.size(); width *= 2) {
      for (size_t begin = 0; begin < s.size(); begin += 2 * width)
        merge(begin, std::min(begin + width, s.size()), std::min(begin + 2 * width, s.size()));
      sorted.swap(buffer);
    }
  }

  int64_t token(int64_t sequence, int64_t position) const {
    const auto& tokens = sequences[sequence];
    return position < static_cast<int64_t>(tokens.size()) ? tokens[position] : kEnd;
  }

  // Merges sorted[begin, middle) and sorted[middle, end) into the buffer. The head of each half is its first
  // entry that is not merged yet. Its `lcp` is relative to the entry that was output last. The head with the
  // longer `lcp` is the smaller sequence; on a tie, the head with the smaller next token. Only if these are
  // equal too, tokens are compared, and the larger head gets the `lcp` that this finds. The other `lcp`s
  // already have the right value for the next comparison.
  void merge(size_t begin, size_t middle, size_t end) {
    size_t left = begin, right = middle, out = begin;
    while (left < middle && right < end) {
      auto &a = sorted[left], &b = sorted[right];
      if (a.lcp == b.lcp && a.next == b.next && a.next != kEnd) {
        const int64_t shared = common_prefix(sequences[a.sequence], sequences[b.sequence], a.lcp + 1);
        const int64_t next_a = token(a.sequence, shared), next_b = token(b.sequence, shared);
        const bool left_first = next_a <= next_b;
        auto& loser = left_first ? b : a;
        buffer[out++] = sorted[left_first ? left++ : right++];
        loser.lcp = static_cast<int32_t>(shared);
        loser.next = left_first ? next_b : next_a;
      } else if (a.lcp > b.lcp || (a.lcp == b.lcp && a.next <= b.next)) {
        buffer[out++] = sorted[left++];
      } else {
        buffer[out++] = sorted[right++];
      }
    }
    const auto rest = std::copy(sorted.begin() + left, sorted.begin() + middle, buffer.begin() + out);
    std::copy(sorted.begin() + right, sorted.begin() + end, rest);
  }
};

// A node of the compressed trie: the tokens of sequence `source` at depths [begin, end).
struct Node {
  int32_t source;
  int64_t begin, end;
  int32_t parent;
  int64_t weight = 0;         // tokens in its subtree
  int32_t num_sequences = 0;  // sequences that pass through it
  int64_t first_token = 0;    // in pre-order
};

struct CompressedTrie {
  std::vector<Node> nodes;  // a parent may come after its children, since a split inserts the upper part
  std::vector<int32_t> end_node;  // by sequence; -1 for an empty one
};

CompressedTrie build_trie(const std::vector<TokenSpan>& sequences, const LcpSorter& sorter) {
  CompressedTrie trie;
  trie.end_node.assign(sequences.size(), -1);
  std::vector<int32_t> path;  // open nodes, root first
  for (const auto& entry : sorter.sorted) {
    const int32_t sequence = entry.sequence;
    const int64_t length = static_cast<int64_t>(sequences[sequence].size());
    const int64_t shared = entry.lcp;
    while (!path.empty() && trie.nodes[path.back()].begin >= shared) path.pop_back();
    if (!path.empty() && trie.nodes[path.back()].end > shared) {
      // The shared prefix ends inside a node, which is cut there. The upper part becomes a new node. The
      // lower part keeps the old index, so end_node of earlier sequences stays valid.
      const int32_t lower = path.back();
      const int32_t upper = static_cast<int32_t>(trie.nodes.size());
      trie.nodes.push_back(
          {trie.nodes[lower].source, trie.nodes[lower].begin, shared, trie.nodes[lower].parent});
      trie.nodes[lower].begin = shared;
      trie.nodes[lower].parent = upper;
      path.back() = upper;
    }
    if (length > shared) {
      trie.nodes.push_back({sequence, shared, length, path.empty() ? -1 : path.back()});
      path.push_back(static_cast<int32_t>(trie.nodes.size()) - 1);
    }
    trie.end_node[sequence] = path.empty() ? -1 : path.back();
  }
  return trie;
}

CompressedTrie build_flat_trie(const std::vector<TokenSpan>& sequences) {
  CompressedTrie trie;
  trie.end_node.assign(sequences.size(), -1);
  for (size_t s = 0; s < sequences.size(); ++s) {
    if (sequences[s].empty()) continue;
    trie.end_node[s] = static_cast<int32_t>(trie.nodes.size());
    trie.nodes.push_back({static_cast<int32_t>(s), 0, static_cast<int64_t>(sequences[s].size()), -1});
  }
  return trie;
}

// Returns the nodes in pre-order. If `heaviest_first`, the children of each node are sorted by weight,
// largest first. Otherwise they stay in the order in which they were created.
std::vector<int32_t> preorder(CompressedTrie& trie, bool heaviest_first) {
  auto& nodes = trie.nodes;
  const int32_t count = static_cast<int32_t>(nodes.size());
  // Children of node p are child_list[child_begin[p + 1] .. child_begin[p + 2]); p = -1 is the virtual root.
  std::vector<int32_t> child_begin(count + 3, 0), child_list(count);
  for (const auto& node : nodes) ++child_begin[node.parent + 3];
  std::partial_sum(child_begin.begin(), child_begin.end(), child_begin.begin());
  for (int32_t n = 0; n < count; ++n) child_list[child_begin[nodes[n].parent + 2]++] = n;
  const auto children = [&](int32_t n) {
    return std::span(child_list).subspan(child_begin[n + 1], child_begin[n + 2] - child_begin[n + 1]);
  };
  // First traversal, parents before children. Weights are summed in its reverse order.
  std::vector<int32_t> node_order;
  node_order.reserve(count);
  std::vector<int32_t> open(children(-1).rbegin(), children(-1).rend());
  while (!open.empty()) {
    const int32_t n = open.back();
    open.pop_back();
    node_order.push_back(n);
    open.insert(open.end(), children(n).rbegin(), children(n).rend());
  }
  for (const int32_t end : trie.end_node)
    if (end >= 0) ++nodes[end].num_sequences;
  for (auto it = node_order.rbegin(); it != node_order.rend(); ++it) {
    auto& node = nodes[*it];
    node.weight += node.end - node.begin;
    if (node.parent < 0) continue;
    nodes[node.parent].weight += node.weight;
    nodes[node.parent].num_sequences += node.num_sequences;
  }
  if (!heaviest_first) return node_order;
  for (int32_t n = -1; n < count; ++n) {
    const auto list = children(n);
    std::stable_sort(list.begin(), list.end(),
                     [&](int32_t a, int32_t b) { return nodes[a].weight > nodes[b].weight; });
  }
  node_order.clear();
  open.assign(children(-1).rbegin(), children(-1).rend());
  while (!open.empty()) {
    const int32_t n = open.back();
    open.pop_back();
    node_order.push_back(n);
    open.insert(open.end(), children(n).rbegin(), children(n).rend());
  }
  return node_order;
}

PrefixTree expand(const std::vector<TokenSpan>& sequences, CompressedTrie& trie, bool heaviest_first) {
  const auto node_order = preorder(trie, heaviest_first);
  auto& nodes = trie.nodes;
  int64_t total = 0;
  for (const int32_t n : node_order) {
    nodes[n].first_token = total;
    total += nodes[n].end - nodes[n].begin;
  }
  check_tree_size(total);
  PrefixTree tree;
  for (auto* column :
       {&tree.tokens, &tree.parent, &tree.depth, &tree.subtree_end, &tree.num_sequences, &tree.chain_begin})
    reserve_in_large_pages(*column, total);
  const auto last_token = [&](int32_t n) {
    return static_cast<int32_t>(nodes[n].first_token + nodes[n].end - nodes[n].begin - 1);
  };
  // Writes all fields node by node, so memory is first touched when it is written. Zeroing the arrays first
  // would be a second traversal of memory, which takes half of the time of a large batch.
  for (const int32_t n : node_order) {
    const auto& node = nodes[n];
    const int32_t begin = static_cast<int32_t>(node.first_token);
    const int32_t length = static_cast<int32_t>(node.end - node.begin);
    const int32_t above = node.parent < 0 ? -1 : last_token(node.parent);
    const int32_t chain = above >= 0 && above == begin - 1 ? tree.chain_begin[above] : begin;
    const auto source = sequences[node.source].begin() + node.begin;
    tree.tokens.insert(tree.tokens.end(), source, source + length);
    tree.subtree_end.insert(tree.subtree_end.end(), length, static_cast<int32_t>(begin + node.weight));
    tree.num_sequences.insert(tree.num_sequences.end(), length, node.num_sequences);
    tree.chain_begin.insert(tree.chain_begin.end(), length, chain);
    tree.parent.resize(begin + length);
    std::iota(tree.parent.begin() + begin, tree.parent.end(), begin - 1);
    tree.parent[begin] = above;
    tree.depth.resize(begin + length);
    std::iota(tree.depth.begin() + begin, tree.depth.end(), static_cast<int32_t>(node.begin));
  }
  tree.sequence_offset.push_back(0);
  for (size_t s = 0; s < sequences.size(); ++s) {
    tree.sequence_end.push_back(trie.end_node[s] < 0 ? -1 : last_token(trie.end_node[s]));
    tree.sequence_offset.push_back(tree.sequence_offset.back() + static_cast<int64_t>(sequences[s].size()));
  }
  return tree;
}

}  // namespace

void check_tree_size(int64_t num_tokens) {
  if (num_tokens > INT32_MAX)
    throw UserError(str("the batch has ", num_tokens, " distinct tokens; a prefix tree holds at most ",
                        INT32_MAX, "; use fewer sequences per batch"));
}

PrefixTree build_prefix_tree(const std::vector<TokenSpan>& sequences) {
  const LcpSorter sorter(sequences);
  auto trie = build_trie(sequences, sorter);
  return expand(sequences, trie, /*heaviest_first=*/true);
}

PrefixTree build_flat_forest(const std::vector<TokenSpan>& sequences) {
  auto trie = build_flat_trie(sequences);
  return expand(sequences, trie, /*heaviest_first=*/false);
}

std::vector<int32_t> PrefixTree::path(int64_t sequence) const {
  std::vector<int32_t> result(sequence_offset[sequence + 1] - sequence_offset[sequence]);
  int64_t filled = static_cast<int64_t>(result.size());
  for (int32_t token = sequence_end[sequence]; token >= 0; token = parent[chain_begin[token]])
    for (int32_t t = token; t >= chain_begin[token]; --t) result[--filled] = t;
  BOUGH_CHECK(filled == 0, "sequence ", sequence, " has ", result.size(), " tokens, but ", filled,
              " are missing from its path");
  return result;
}

void PrefixTree::check_integrity(const std::vector<TokenSpan>& sequences) const {
  const int64_t count = num_tokens();
  for (int64_t t = 0; t < count; ++t) {
    const int32_t p = parent[t];
    BOUGH_CHECK(p < t && p >= -1, "token ", t, " has parent ", p);
    BOUGH_CHECK(depth[t] == (p < 0 ? 0 : depth[p] + 1), "token ", t, " at depth ", depth[t]);
    BOUGH_CHECK(subtree_end[t] > t && subtree_end[t] <= (p < 0 ? count : subtree_end[p]), "token ", t,
                " ends at ", subtree_end[t]);
    BOUGH_CHECK(num_sequences[t] >= 1 && (p < 0 || num_sequences[t] <= num_sequences[p]), "token ", t,
                " has ", num_sequences[t], " sequences");
    BOUGH_CHECK(chain_begin[t] == (p >= 0 && p == t - 1 ? chain_begin[p] : t), "token ", t, " in chain ",
                chain_begin[t]);
  }
  BOUGH_CHECK(sequences.size() == sequence_end.size(), "sequences ", sequences.size(), ", ends ",
              sequence_end.size());
  for (size_t s = 0; s < sequences.size(); ++s) {
    const auto tokens_of_path = path(s);
    BOUGH_CHECK(tokens_of_path.size() == sequences[s].size(), "sequence ", s, " of ", sequences[s].size(),
                " tokens has a path of ", tokens_of_path.size());
    for (size_t i = 0; i < tokens_of_path.size(); ++i)
      BOUGH_CHECK(
          tokens[tokens_of_path[i]] == sequences[s][i] && depth[tokens_of_path[i]] == static_cast<int32_t>(i),
          "sequence ", s, " position ", i);
  }
}

TreeStatistics compute_statistics(const PrefixTree& tree) {
  TreeStatistics s;
  s.num_sequences = tree.num_sequences_total();
  s.num_flat_tokens = tree.num_flat_tokens();
  s.num_tree_tokens = tree.num_tokens();
  double flat_pairs = 0, tree_pairs = 0, depth_sum = 0;
  for (int64_t i = 0; i < s.num_sequences; ++i) {
    const double length = static_cast<double>(tree.sequence_offset[i + 1] - tree.sequence_offset[i]);
    flat_pairs += length * (length + 1) / 2;
    s.longest_path = std::max<int64_t>(s.longest_path, tree.sequence_offset[i + 1] - tree.sequence_offset[i]);
  }
  std::vector<int32_t> num_children(tree.num_tokens(), 0);
  for (int64_t t = 0; t < tree.num_tokens(); ++t) {
    tree_pairs += tree.depth[t] + 1.0;
    depth_sum += tree.depth[t];
    s.num_leaves += tree.subtree_end[t] == t + 1;
    if (tree.parent[t] >= 0 && ++num_children[tree.parent[t]] == 2) ++s.num_branch_points;
  }
  if (s.num_tree_tokens > 0) {
    s.compression = static_cast<double>(s.num_flat_tokens) / static_cast<double>(s.num_tree_tokens);
    s.mean_depth = depth_sum / static_cast<double>(s.num_tree_tokens);
    s.attention_compression = flat_pairs / tree_pairs;
  }
  s.potential_overlap_ratio = 1 - 1 / s.compression;
  return s;
}

StepWork count_work(const PrefixTree& tree, const std::vector<uint8_t>& trained, const WorkModel& work) {
  StepWork sum;
  std::vector<uint8_t> trained_in_tree(tree.num_tokens(), 0);
  for (int64_t s = 0; s < tree.num_sequences_total(); ++s) {
    const auto path = tree.path(s);
    for (size_t i = 0; i < path.size(); ++i) {
      const bool row = i > 0 && trained[tree.sequence_offset[s] + i];
      sum.flat += work.flops_per_token + work.flops_per_pair * static_cast<double>(i + 1) +
                  (row ? work.flops_per_head_row : 0);
      if (row) trained_in_tree[path[i]] = 1;
    }
  }
  for (int64_t t = 0; t < tree.num_tokens(); ++t)
    sum.tree += work.flops_per_token + work.flops_per_pair * (tree.depth[t] + 1.0) +
                (trained_in_tree[t] ? work.flops_per_head_row : 0);
  return sum;
}

}  // namespace bough

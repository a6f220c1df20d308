#include "tree/prefix_tree.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/error.h"

namespace bough {

namespace {

int64_t common_prefix(TokenSpan a, TokenSpan b, int64_t from) {
  const int64_t limit = static_cast<int64_t>(std::min(a.size(), b.size()));
  int64_t length = from;
  while (length < limit && a[length] == b[length]) ++length;
  return length;
}

// Sorts indices of sequences lexicographically and finds the common prefix of neighbours, by a merge sort that
// carries common prefixes along (Ng and Kakehi 2008): no token is compared twice along a merge, where plain
// comparison sorting reads shared prefixes again and again. Stable.
struct LcpSorter {
  const std::vector<TokenSpan>& sequences;
  std::vector<int32_t> order, order_buffer;
  std::vector<int32_t> lcp, lcp_buffer;  // lcp[i]: of order[i-1] and order[i]; undefined at a run's start

  explicit LcpSorter(const std::vector<TokenSpan>& s)
      : sequences(s), order(s.size()), order_buffer(s.size()), lcp(s.size(), 0), lcp_buffer(s.size(), 0) {
    std::iota(order.begin(), order.end(), 0);
    for (size_t width = 1; width < s.size(); width *= 2) {
      for (size_t begin = 0; begin < s.size(); begin += 2 * width)
        merge(begin, std::min(begin + width, s.size()), std::min(begin + 2 * width, s.size()));
      order.swap(order_buffer);
      lcp.swap(lcp_buffer);
    }
  }

  // Merges order[begin, middle) and order[middle, end) into the buffers. left_lcp and right_lcp are the common
  // prefixes of each side's head with the last output: the longer one is the smaller sequence.
  void merge(size_t begin, size_t middle, size_t end) {
    size_t left = begin, right = middle;
    int64_t left_lcp = 0, right_lcp = 0;
    for (size_t out = begin; out < end; ++out) {
      bool take_left;
      int64_t next_lcp = 0;
      if (left == middle || right == end) {
        take_left = right == end;
      } else if (left_lcp != right_lcp) {
        take_left = left_lcp > right_lcp;
        next_lcp = std::min(left_lcp, right_lcp);
      } else {
        const auto a = sequences[order[left]], b = sequences[order[right]];
        next_lcp = common_prefix(a, b, left_lcp);
        take_left = next_lcp == static_cast<int64_t>(a.size()) ||
                    (next_lcp < static_cast<int64_t>(b.size()) && a[next_lcp] < b[next_lcp]);
      }
      const bool had_both = left < middle && right < end;
      if (take_left) {
        order_buffer[out] = order[left];
        lcp_buffer[out] = static_cast<int32_t>(left_lcp);
        ++left;
        left_lcp = left < middle ? lcp[left] : 0;
        if (had_both) right_lcp = next_lcp;
      } else {
        order_buffer[out] = order[right];
        lcp_buffer[out] = static_cast<int32_t>(right_lcp);
        ++right;
        right_lcp = right < end ? lcp[right] : 0;
        if (had_both) left_lcp = next_lcp;
      }
    }
  }
};

// A node of the compressed trie: a run of tokens, of sequence `source` at depths [begin, end).
struct Node {
  int32_t source;
  int64_t begin, end;
  int32_t parent;
  int64_t weight = 0;         // tokens of its subtree
  int32_t num_sequences = 0;  // through it
  int64_t first_token = 0;    // in pre-order
};

struct CompressedTrie {
  std::vector<Node> nodes;        // a parent may stand after its children (a node is split from above)
  std::vector<int32_t> end_node;  // of each sequence; -1 for an empty one
};

CompressedTrie build_trie(const std::vector<TokenSpan>& sequences, const LcpSorter& sorted) {
  CompressedTrie trie;
  trie.end_node.assign(sequences.size(), -1);
  std::vector<int32_t> path;  // open nodes, root first
  for (size_t i = 0; i < sorted.order.size(); ++i) {
    const int32_t sequence = sorted.order[i];
    const int64_t length = static_cast<int64_t>(sequences[sequence].size());
    const int64_t shared = i == 0 ? 0 : sorted.lcp[i];
    while (!path.empty() && trie.nodes[path.back()].begin >= shared) path.pop_back();
    if (!path.empty() && trie.nodes[path.back()].end > shared) {
      // The shared prefix ends inside a node: what lies above becomes a node of its own, and everything that knew
      // the old one as its end keeps it as the lower part.
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

// Nodes in pre-order, the children of each sorted by `heaviest_first` or left in the order they were made.
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
  // A first walk, parents before children; backwards it sums weights.
  std::vector<int32_t> walk;
  walk.reserve(count);
  std::vector<int32_t> open(children(-1).rbegin(), children(-1).rend());
  while (!open.empty()) {
    const int32_t n = open.back();
    open.pop_back();
    walk.push_back(n);
    open.insert(open.end(), children(n).rbegin(), children(n).rend());
  }
  for (const int32_t end : trie.end_node)
    if (end >= 0) ++nodes[end].num_sequences;
  for (auto it = walk.rbegin(); it != walk.rend(); ++it) {
    auto& node = nodes[*it];
    node.weight += node.end - node.begin;
    if (node.parent < 0) continue;
    nodes[node.parent].weight += node.weight;
    nodes[node.parent].num_sequences += node.num_sequences;
  }
  if (!heaviest_first) return walk;
  for (int32_t n = -1; n < count; ++n) {
    const auto list = children(n);
    std::stable_sort(list.begin(), list.end(),
                     [&](int32_t a, int32_t b) { return nodes[a].weight > nodes[b].weight; });
  }
  walk.clear();
  open.assign(children(-1).rbegin(), children(-1).rend());
  while (!open.empty()) {
    const int32_t n = open.back();
    open.pop_back();
    walk.push_back(n);
    open.insert(open.end(), children(n).rbegin(), children(n).rend());
  }
  return walk;
}

PrefixTree expand(const std::vector<TokenSpan>& sequences, CompressedTrie& trie, bool heaviest_first) {
  const auto walk = preorder(trie, heaviest_first);
  auto& nodes = trie.nodes;
  int64_t total = 0;
  for (const int32_t n : walk) {
    nodes[n].first_token = total;
    total += nodes[n].end - nodes[n].begin;
  }
  if (total > INT32_MAX)
    throw UserError(str("the batch has ", total, " distinct tokens; a prefix tree holds at most ", INT32_MAX,
                        ": train on fewer sequences at once"));
  PrefixTree tree;
  tree.tokens.resize(total);
  tree.parent.resize(total);
  tree.depth.resize(total);
  tree.subtree_end.resize(total);
  tree.num_sequences.resize(total);
  tree.chain_begin.resize(total);
  const auto last_token = [&](int32_t n) {
    return static_cast<int32_t>(nodes[n].first_token + nodes[n].end - nodes[n].begin - 1);
  };
  for (const int32_t n : walk) {
    const auto& node = nodes[n];
    const int32_t begin = static_cast<int32_t>(node.first_token);
    const int32_t length = static_cast<int32_t>(node.end - node.begin);
    std::memcpy(tree.tokens.data() + begin, sequences[node.source].data() + node.begin,
                length * sizeof(int32_t));
    const int32_t above = node.parent < 0 ? -1 : last_token(node.parent);
    const int32_t chain = above >= 0 && above == begin - 1 ? tree.chain_begin[above] : begin;
    for (int32_t i = 0; i < length; ++i) {
      tree.parent[begin + i] = i ? begin + i - 1 : above;
      tree.depth[begin + i] = static_cast<int32_t>(node.begin) + i;
      tree.subtree_end[begin + i] = static_cast<int32_t>(begin + node.weight);
      tree.num_sequences[begin + i] = node.num_sequences;
      tree.chain_begin[begin + i] = chain;
    }
  }
  tree.sequence_offset.push_back(0);
  for (size_t s = 0; s < sequences.size(); ++s) {
    tree.sequence_end.push_back(trie.end_node[s] < 0 ? -1 : last_token(trie.end_node[s]));
    tree.sequence_offset.push_back(tree.sequence_offset.back() + static_cast<int64_t>(sequences[s].size()));
  }
  return tree;
}

}  // namespace

PrefixTree build_prefix_tree(const std::vector<TokenSpan>& sequences) {
  const LcpSorter sorted(sequences);
  auto trie = build_trie(sequences, sorted);
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
  BOUGH_CHECK(filled == 0, "sequence ", sequence, " has ", result.size(), " tokens, its path lacks ", filled);
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
  s.space_saving = 1 - 1 / s.compression;
  s.tree_token_ratio = 1 / s.compression;
  s.potential_overlap_ratio = s.space_saving;
  return s;
}

double work_ratio(const PrefixTree& tree, const std::vector<uint8_t>& trained, const WorkModel& work) {
  double flat = 0, shared = 0;
  std::vector<uint8_t> trained_in_tree(tree.num_tokens(), 0);
  for (int64_t s = 0; s < tree.num_sequences_total(); ++s) {
    const auto path = tree.path(s);
    for (size_t i = 0; i < path.size(); ++i) {
      const bool row = i > 0 && trained[tree.sequence_offset[s] + i];
      flat += work.flops_per_token + work.flops_per_pair * static_cast<double>(i + 1) +
              (row ? work.flops_per_head_row : 0);
      if (row) trained_in_tree[path[i]] = 1;
    }
  }
  for (int64_t t = 0; t < tree.num_tokens(); ++t)
    shared += work.flops_per_token + work.flops_per_pair * (tree.depth[t] + 1.0) +
              (trained_in_tree[t] ? work.flops_per_head_row : 0);
  return shared > 0 ? flat / shared : 1;
}

}  // namespace bough

// `blocks`: leaf blocks are forests filled up from all along the stack; interior blocks hold through-tokens only.
//
// With passes of b tokens, a token is *big* if more than b tokens hang off it (itself counted); big tokens are closed
// upwards and become interior blocks. What hangs off them are *pieces*: subtrees of at most b tokens, whole. The walk
// goes down runs of big tokens, which are cut only where two or more big children part (fewer than T/b times) and into
// even chunks of at most b. A piece can run at any time while the token it hangs off lies on the stack, so it waits:
// when an interior block is about to close, its own pieces must run, and the room their passes leave is filled with
// the largest pieces that wait further down the stack. Passes are nearly full on any tree of short segments, where a
// walk path by path starves the device.
#include <algorithm>
#include <compare>
#include <limits>
#include <map>
#include <set>

#include "tree/root_split.h"
#include "tree/strategies.h"

namespace bough {

namespace {

class BlocksWalk {
 public:
  BlocksWalk(const IndexedTree& whole, int64_t limit)
      : whole_(whole),
        tree_(*whole.tree),
        limit_(static_cast<int32_t>(std::min<int64_t>(limit, std::numeric_limits<int32_t>::max()))),
        builder_(whole, limit) {}

  PlannedTree run() {
    waiting_at_.resize(1);
    idle_at_.resize(1);
    std::vector<Visit> todo;
    descend(-1, todo);
    while (!todo.empty()) {
      const auto visit = todo.back();
      todo.pop_back();
      close_to(visit.num_open);
      go_down(visit.node, todo);
    }
    close_to(0);
    flush(0);
    return builder_.finish();
  }

 private:
  struct Visit {
    int32_t node;
    size_t num_open;  // blocks open above it
  };
  struct Attached {
    int32_t token;  // what the piece hangs off
    TokenRange range;
  };
  struct BySize {
    int32_t size, piece;
    auto operator<=>(const BySize&) const = default;
  };

  const BranchNode& node(int32_t index) const { return whole_.branches.nodes[index]; }
  TokenRange subtree(int32_t index) const {
    return {node(index).begin, tree_.subtree_end[node(index).begin]};
  }
  bool is_big(int32_t index) const { return subtree(index).size() > limit_; }

  // Small children of a node (-1: the virtual root) wait at the current level; big ones are to be visited, the first of
  // them next.
  void descend(int32_t index, std::vector<Visit>& todo) {
    const auto children = whole_.branches.children(index);
    for (auto it = children.rbegin(); it != children.rend(); ++it) {
      if (is_big(*it)) todo.push_back({*it, builder_.num_open()});
      else wait(builder_.num_open(), subtree(*it));
    }
  }

  void wait(size_t level, TokenRange range) {
    const auto piece = static_cast<int32_t>(pieces_.size());
    pieces_.push_back(range);
    if (whole_.num_trained(range) == 0) {
      idle_at_[level].push_back({range.size(), piece});
      return;
    }
    waiting_at_[level].push_back(piece);
    waiting_.insert({range.size(), piece});
  }

  // Pushes the run of big tokens that begins at this node, up to where it ends or parts.
  void go_down(int32_t index, std::vector<Visit>& todo) {
    const int32_t run_begin = node(index).begin;
    int32_t run_end;
    std::vector<Attached> attached;
    bool parts = false;
    for (;;) {
      const int32_t subtree_end = subtree(index).end;
      const int32_t end = node(index).end;
      run_end = std::min(end, subtree_end - limit_);
      if (run_end < end) {  // the rest of the node and all that hangs off it is one piece
        attached.push_back({run_end - 1, {run_end, subtree_end}});
        break;
      }
      const auto children = whole_.branches.children(index);
      parts = std::count_if(children.begin(), children.end(), [&](int32_t c) { return is_big(c); }) != 1;
      if (parts) break;
      // The big child is the heaviest, hence the first: its tokens follow on.
      for (const int32_t child : children.subspan(1)) attached.push_back({end - 1, subtree(child)});
      index = children.front();
    }
    push_run(run_begin, run_end, attached);
    if (parts) descend(index, todo);
  }

  void push_run(int32_t begin, int32_t end, const std::vector<Attached>& attached) {
    size_t level = builder_.num_open() + 1;
    builder_.add_run(begin, end, /*is_leaf=*/false);
    waiting_at_.resize(builder_.num_open() + 1);
    idle_at_.resize(builder_.num_open() + 1);
    for (const auto& piece : attached) {  // in the order of their tokens
      while (builder_.open_range(level - 1).end <= piece.token) ++level;
      wait(level, piece.range);
    }
  }

  void close_to(size_t count) {
    while (builder_.num_open() > count) {
      flush(builder_.num_open());
      waiting_at_.pop_back();
      idle_at_.pop_back();
      builder_.close_to(builder_.num_open() - 1);
    }
  }

  struct Bin {
    int32_t room;
    std::vector<TokenRange> ranges;
  };

  // Runs what still waits at the level on top: best-fit decreasing, then the largest that fit from further down.
  // Pieces that train nothing are never run: they have blocks of their own, so that nothing waits on them.
  void flush(size_t level) {
    std::vector<BySize> own;
    for (const int32_t piece : waiting_at_[level])
      if (const BySize key{pieces_[piece].size(), piece}; waiting_.erase(key)) own.push_back(key);
    for (auto& bin : pack(own)) {
      for (;;) {
        auto it = waiting_.upper_bound({bin.room, std::numeric_limits<int32_t>::max()});
        if (it == waiting_.begin()) break;
        --it;
        bin.room -= it->size;
        bin.ranges.push_back(pieces_[it->piece]);
        waiting_.erase(it);
      }
      builder_.add_leaf(joined(std::move(bin.ranges)));
    }
    for (auto& bin : pack(idle_at_[level])) builder_.add_leaf(joined(std::move(bin.ranges)));
    idle_at_[level].clear();
  }

  std::vector<Bin> pack(std::vector<BySize> own) const {
    std::stable_sort(own.begin(), own.end(), [](auto a, auto b) { return a.size > b.size; });
    std::vector<Bin> bins;
    std::multimap<int32_t, size_t> by_room;
    for (const auto& [size, piece] : own) {
      size_t bin = bins.size();
      if (const auto it = by_room.lower_bound(size); it != by_room.end()) {
        bin = it->second;
        by_room.erase(it);
      } else {
        bins.push_back({limit_, {}});
      }
      bins[bin].room -= size;
      bins[bin].ranges.push_back(pieces_[piece]);
      by_room.insert({bins[bin].room, bin});
    }
    return bins;
  }

  // In pre-order, neighbours as one.
  static std::vector<TokenRange> joined(std::vector<TokenRange> ranges) {
    std::sort(ranges.begin(), ranges.end(), [](auto a, auto b) { return a.begin < b.begin; });
    std::vector<TokenRange> result;
    for (const auto range : ranges) {
      if (!result.empty() && result.back().end == range.begin) result.back().end = range.end;
      else result.push_back(range);
    }
    return result;
  }

  const IndexedTree& whole_;
  const PrefixTree& tree_;
  int32_t limit_;
  PlanBuilder builder_;
  std::vector<TokenRange> pieces_;
  std::set<BySize> waiting_;
  // By the number of blocks open up to the one that the piece hangs off; 0: the virtual root.
  std::vector<std::vector<int32_t>> waiting_at_;
  std::vector<std::vector<BySize>> idle_at_;  // likewise, pieces that train nothing
};

}  // namespace

const IndexedTree& PartTrees::get(std::vector<int64_t> part, const PlanRequest& request,
                                  const IndexedTree& whole) {
  if (auto found = last_.extract(part)) return own_.insert(std::move(found)).position->second;
  std::vector<TokenSpan> sequences;
  for (const int64_t index : part) sequences.push_back(request.sequences[index]);
  auto indexed = index_tree(build_prefix_tree(sequences), part, request, whole.tree.get());
  return own_.emplace(std::move(part), std::move(indexed)).first->second;
}

Plan plan_blocks(const PlanRequest& request, const IndexedTree& whole, int64_t max_tokens_per_pass,
                 PartTrees& parts) {
  Plan plan{"blocks", max_tokens_per_pass, {}};
  std::vector<std::vector<int64_t>> groups;
  if (request.costs)
    groups = split_short_roots(whole, *request.costs, max_tokens_per_pass, request.max_tokens_per_pass);
  if (groups.size() <= 1) {
    plan.trees.push_back(BlocksWalk(whole, max_tokens_per_pass).run());
    return plan;
  }
  parts.begin_plan();
  for (auto& group : groups) {
    for (int64_t& index : group) index = whole.sequences[index];
    plan.trees.push_back(BlocksWalk(parts.get(std::move(group), request, whole), max_tokens_per_pass).run());
  }
  return plan;
}

}  // namespace bough

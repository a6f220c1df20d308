// Strategy `blocks`: leaf blocks are forests whose pieces may hang off any token on the prefix KV stack.
// Interior blocks hold only tokens that leaf blocks continue.
//
// Let a pass have at most b tokens. A token is *big* if its subtree (the token included) has more than b
// tokens. If a token is big, so are all tokens above it. Big tokens become interior blocks. The subtrees that
// hang off big tokens are *pieces*: at most b tokens each, never cut.
//
// The traversal follows runs of big tokens. It cuts a run only where two or more big children branch off
// (fewer than T/b times), and into even chunks of at most b tokens. A piece can run at any time while its
// parent token lies on the stack, so it waits. Before an interior block is popped, the pieces that hang off
// it must run. Free tokens of their passes are filled with the largest waiting pieces that hang off blocks
// closer to the root. So passes are nearly full on any tree of short segments. Executing one path at a time
// would leave the device underused.
#include <algorithm>
#include <limits>
#include <map>

#include "plan/plan_builder.h"
#include "plan/plan_strategies.h"
#include "plan/recompute_policy.h"

namespace bough {

namespace {

class BlocksTraversal {
 public:
  BlocksTraversal(TreeView view, int64_t limit)
      : view_(std::move(view)),
        limit_(static_cast<int32_t>(std::min<int64_t>(limit, std::numeric_limits<int32_t>::max()))),
        builder_(view_, limit) {}

  PlanBuilder& builder() { return builder_; }

  PlannedTree run() {
    waiting_at_.resize(1);
    idle_at_.resize(1);
    std::vector<Visit> todo;
    descend(-1, todo);
    while (!todo.empty() && builder_.fits()) {
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
    size_t num_open;  // blocks open above this node
  };
  struct Attached {
    int32_t token;  // the token that the piece hangs off
    TokenRange range;
  };
  struct BySize {
    int32_t size, piece;
  };

  bool is_big(int32_t index) const { return view_.subtree(index).size() > limit_; }

  // Small children of node `index` (-1: the virtual root) become pieces that wait at the current level
  // (number of open blocks). Big children are visited later, the first of them next.
  void descend(int32_t index, std::vector<Visit>& todo) {
    const auto children = index < 0 ? view_.roots() : view_.children(index);
    for (auto it = children.rbegin(); it != children.rend(); ++it) {
      if (is_big(*it)) todo.push_back({*it, builder_.num_open()});
      else wait(builder_.num_open(), view_.subtree(*it));
    }
  }

  void wait(size_t level, TokenRange range) {
    const auto piece = static_cast<int32_t>(pieces_.size());
    pieces_.push_back(range);
    is_waiting_.push_back(true);
    if (view_.num_trained(range) == 0) {
      idle_at_[level].push_back({range.size(), piece});
      return;
    }
    waiting_at_[level].push_back(piece);
    waiting_[range.size()].push_back(piece);
  }

  // Pushes the run of big tokens that begins at this node. The run ends before the first token that is not
  // big, or at a node that does not have exactly one big child.
  void go_down(int32_t index, std::vector<Visit>& todo) {
    const int32_t run_begin = view_.stretch(index).begin;
    int32_t run_end;
    std::vector<Attached> attached;
    bool parts = false;
    for (;;) {
      const int32_t subtree_end = view_.subtree(index).end;
      const int32_t end = view_.stretch(index).end;
      run_end = std::min(end, subtree_end - limit_);
      if (run_end < end) {  // the rest of the node and everything that hangs off it is one piece
        attached.push_back({run_end - 1, {run_end, subtree_end}});
        break;
      }
      const auto children = view_.children(index);
      parts = std::count_if(children.begin(), children.end(), [&](int32_t c) { return is_big(c); }) != 1;
      if (parts) break;
      // The big child is the heaviest child, so it comes first: its tokens follow directly.
      for (const int32_t child : children.subspan(1)) attached.push_back({end - 1, view_.subtree(child)});
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

  // Runs the pieces that hang off the top open block and still wait, packed by best-fit decreasing. The free
  // tokens of each pass take the largest fitting pieces of lower levels. Pieces without trained tokens never
  // run. They get blocks of their own, so no other piece shares a block with them.
  void flush(size_t level) {
    std::vector<BySize> own;
    int64_t num_tokens = 0;
    for (const int32_t piece : waiting_at_[level]) {
      if (!is_waiting_[piece]) continue;
      is_waiting_[piece] = false;
      own.push_back({pieces_[piece].size(), piece});
      num_tokens += own.back().size;
    }
    // If there are several bins, at least one is more than half full. Otherwise the pieces of two bins would
    // have gone into one bin.
    if (num_tokens > limit_ && !builder_.has_room_for(limit_ / 2 + 1)) return;
    for (auto& bin : pack(own)) {
      if (!builder_.fits()) return;
      for (int32_t piece; (piece = take_largest(bin.room)) >= 0;) {
        bin.room -= pieces_[piece].size();
        bin.ranges.push_back(pieces_[piece]);
      }
      builder_.add_leaf(joined(std::move(bin.ranges)));
    }
    for (auto& bin : pack(idle_at_[level])) builder_.add_leaf(joined(std::move(bin.ranges)));
    idle_at_[level].clear();
  }

  // The largest waiting piece of at most `room` tokens; of equal sizes, the last added. -1 if none fits.
  int32_t take_largest(int32_t room) {
    auto it = waiting_.upper_bound(room);
    while (it != waiting_.begin()) {
      --it;
      auto& pieces = it->second;
      while (!pieces.empty()) {
        const int32_t piece = pieces.back();
        pieces.pop_back();
        if (!is_waiting_[piece]) continue;  // has run already, in the flush() of its level
        is_waiting_[piece] = false;
        return piece;
      }
      it = waiting_.erase(it);
    }
    return -1;
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

  // The ranges in pre-order, with adjacent ranges merged.
  static std::vector<TokenRange> joined(std::vector<TokenRange> ranges) {
    std::sort(ranges.begin(), ranges.end(), [](auto a, auto b) { return a.begin < b.begin; });
    std::vector<TokenRange> result;
    for (const auto range : ranges) {
      if (!result.empty() && result.back().end == range.begin) result.back().end = range.end;
      else result.push_back(range);
    }
    return result;
  }

  TreeView view_;
  int32_t limit_;
  PlanBuilder builder_;
  std::vector<TokenRange> pieces_;
  std::vector<bool> is_waiting_;                     // by piece
  std::map<int32_t, std::vector<int32_t>> waiting_;  // by size; includes pieces that no longer wait
  // Pieces by level: the number of open blocks down to the block they hang off. 0: the virtual root.
  std::vector<std::vector<int32_t>> waiting_at_;
  std::vector<std::vector<BySize>> idle_at_;  // by level: pieces without trained tokens
};

}  // namespace

BlocksDraft draft_blocks(IndexedTree& whole, int64_t max_tokens_per_pass, std::optional<int64_t> most_bytes,
                         LayerRecompute layers) {
  BlocksDraft draft{{"blocks", max_tokens_per_pass, {}}, {}};
  const auto& request = whole.request();
  const auto* costs = request.costs;
  const RecomputeRules rules{.layers = layers, .offload = request.offload};
  if (costs) draft.parts = split_short_roots(whole, *costs, max_tokens_per_pass, request.max_tokens_per_pass);
  // All loss rows of the batch are held during the whole plan execution.
  const int64_t room = most_bytes ? *most_bytes - whole.num_rows(whole.all()) * costs->row_bytes() : 0;
  const auto traversal = [&](TreeView view) {
    BlocksTraversal traversal(std::move(view), max_tokens_per_pass);
    if (most_bytes) traversal.builder().bound_memory(*costs, room, rules);
    draft.plan.trees.push_back(traversal.run());
    draft.fits = traversal.builder().fits();
  };
  if (draft.parts.size() <= 1) {
    draft.parts.clear();
    traversal(TreeView(whole));
    return draft;
  }
  for (const auto& part : draft.parts) {
    if (part.path.empty()) {
      traversal(TreeView(whole, std::span(part.nodes)));
    } else if (auto leaf = whole.leaf_block(part); leaf.num_tokens <= max_tokens_per_pass) {
      draft.fits = !most_bytes || !leaf.needed || least_pass_bytes(*costs, leaf.shape(), rules) <= room;
      draft.plan.trees.push_back({nullptr, {}, {std::move(leaf)}, {{Step::Kind::kForwardBackward, 0}}});
    } else {
      traversal(TreeView(whole, part));
    }
    if (!draft.fits) break;
  }
  return draft;
}

Plan finish_blocks(BlocksDraft draft, IndexedTree& whole) {
  if (draft.parts.empty()) {
    draft.plan.trees.front().tree = whole.shared_tree();
    draft.plan.trees.front().sequences = whole.all_sequences();
  }
  for (size_t i = 0; i < draft.parts.size(); ++i) {
    auto& planned = draft.plan.trees[i];
    planned.sequences = whole.sequences_of(draft.parts[i]);
    std::vector<TokenSpan> sequences;
    for (const int64_t index : planned.sequences) sequences.push_back(whole.request().sequences[index]);
    planned.tree = std::make_shared<const PrefixTree>(build_prefix_tree(sequences));
    if (draft.parts[i].path.empty()) whole.renumber(draft.parts[i], planned);
  }
  return std::move(draft.plan);
}

}  // namespace bough

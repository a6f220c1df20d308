#include "tree/plan.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace bough {

namespace {

void check_pass_size(int64_t max_tokens_per_pass) {
  if (max_tokens_per_pass < 1)
    throw UserError(
        str("max_tokens_per_mb: got ", max_tokens_per_pass, ", expected at least 1 token a pass"));
}

std::vector<int64_t> all_sequences(const PrefixTree& tree) {
  std::vector<int64_t> indices(tree.sequence_end.size());
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

// Appends blocks and steps in the order of a walk; keeps the chain of open interior blocks.
class PlanBuilder {
 public:
  PlanBuilder(PlannedTree& planned, int64_t max_tokens_per_pass)
      : planned_(planned), limit_(max_tokens_per_pass) {}

  int64_t stack_rows() const { return stack_rows_; }
  size_t num_open() const { return open_.size(); }

  // Tokens [begin, end) in even chunks of at most B. With `is_leaf` the last chunk is a leaf block; all others are
  // pushed and stay open.
  void add_run(int32_t begin, int32_t end, bool is_leaf) {
    const int64_t count = end - begin;
    const int64_t num_chunks = (count + limit_ - 1) / limit_;
    for (int64_t i = 0; i < num_chunks; ++i) {
      const TokenRange range{static_cast<int32_t>(begin + count * i / num_chunks),
                             static_cast<int32_t>(begin + count * (i + 1) / num_chunks)};
      is_leaf&& i == num_chunks - 1 ? add_leaf({range}) : push({range});
    }
  }

  void add_leaf(std::vector<TokenRange> ranges) {
    planned_.steps.push_back({Step::Kind::kForwardBackward, add_block(false, std::move(ranges))});
  }

  // Closes open blocks, last first, until `count` are left.
  void close_to(size_t count) {
    while (open_.size() > count) {
      const int32_t block = open_.back();
      open_.pop_back();
      stack_rows_ -= planned_.blocks[block].num_tokens;
      planned_.steps.push_back({Step::Kind::kBackward, block});
    }
  }

 private:
  void push(std::vector<TokenRange> ranges) {
    const int32_t block = add_block(true, std::move(ranges));
    planned_.steps.push_back({Step::Kind::kForward, block});
    open_.push_back(block);
    stack_rows_ += planned_.blocks[block].num_tokens;
    planned_.stack_capacity = std::max(planned_.stack_capacity, stack_rows_);
  }

  int32_t add_block(bool interior, std::vector<TokenRange> ranges) {
    Block block{interior, open_.empty() ? -1 : open_.back(), stack_rows_, std::move(ranges)};
    for (const auto& range : block.ranges) block.num_tokens += range.size();
    planned_.blocks.push_back(std::move(block));
    return static_cast<int32_t>(planned_.blocks.size()) - 1;
  }

  PlannedTree& planned_;
  int64_t limit_;
  std::vector<int32_t> open_;
  int64_t stack_rows_ = 0;
};

// A stretch of the tree between branch points: tokens [begin, end), each but the last with exactly one child.
struct Stretch {
  int32_t begin, end;
  int32_t parent;                 // -1 below the virtual root
  std::vector<int32_t> children;  // in the order they are visited
  int64_t tail = 0;               // Algorithm 1: depth of the leaf visited last
  bool is_leaf() const { return children.empty(); }
};

// Stretches with parents before children; roots' own list in `roots`. Children in the order of Algorithm 1 reversed:
// internal ones first, those of larger tail before, so that short leaves come last, when nothing above needs to be
// forwarded again for them.
std::vector<Stretch> make_stretches(const PrefixTree& tree, std::vector<int32_t>& roots) {
  std::vector<Stretch> stretches;
  const int64_t count = tree.num_tokens();
  std::vector<int32_t> stretch_of_end(count, -1);
  for (int32_t t = 0; t < count;) {
    int32_t end =
        t + 1;  // the next token continues the stretch iff it is the only child: its subtree is all there is
    while (end < tree.subtree_end[t] && tree.parent[end] == end - 1 &&
           tree.subtree_end[end] == tree.subtree_end[end - 1])
      ++end;
    const int32_t parent = tree.parent[t] < 0 ? -1 : stretch_of_end[tree.parent[t]];
    const int32_t index = static_cast<int32_t>(stretches.size());
    stretch_of_end[end - 1] = index;
    stretches.push_back({t, end, parent, {}});
    (parent < 0 ? roots : stretches[parent].children).push_back(index);
    t = end;
  }
  const auto order = [&](std::vector<int32_t>& children) {
    std::stable_sort(children.begin(), children.end(), [&](int32_t a, int32_t b) {
      const auto &x = stretches[a], &y = stretches[b];
      return x.is_leaf() != y.is_leaf() ? !x.is_leaf() : x.tail > y.tail;
    });
  };
  for (auto it = stretches.rbegin(); it != stretches.rend(); ++it) {
    order(it->children);
    it->tail = it->is_leaf() ? tree.depth[it->end - 1] + 1 : stretches[it->children.back()].tail;
  }
  order(roots);
  return stretches;
}

}  // namespace

Plan plan_dense(const std::vector<TokenSpan>& sequences, int64_t max_tokens_per_pass) {
  check_pass_size(max_tokens_per_pass);
  Plan plan{"dense", max_tokens_per_pass, {}};
  PlannedTree planned{build_flat_forest(sequences)};
  planned.sequences = all_sequences(planned.tree);
  PlanBuilder builder(planned, max_tokens_per_pass);
  const auto& tree = planned.tree;
  TokenRange pass{0, 0};
  const auto flush = [&] {
    if (pass.size() > 0) builder.add_leaf({pass});
    pass.begin = pass.end;
  };
  for (int32_t root = 0; root < tree.num_tokens(); root = tree.subtree_end[root]) {
    const int32_t end = tree.subtree_end[root];
    if (end - pass.begin > max_tokens_per_pass) flush();
    if (end - root > max_tokens_per_pass) {
      builder.add_run(root, end, /*is_leaf=*/true);
      builder.close_to(0);
      pass.begin = end;
    }
    pass.end = end;
  }
  flush();
  plan.trees.push_back(std::move(planned));
  return plan;
}

Plan plan_path(const std::vector<TokenSpan>& sequences, int64_t max_tokens_per_pass) {
  check_pass_size(max_tokens_per_pass);
  Plan plan{"path", max_tokens_per_pass, {}};
  PlannedTree planned{build_prefix_tree(sequences)};
  planned.sequences = all_sequences(planned.tree);
  PlanBuilder builder(planned, max_tokens_per_pass);
  std::vector<int32_t> roots;
  const auto stretches = make_stretches(planned.tree, roots);
  struct Visit {
    int32_t stretch;
    size_t num_open;  // blocks open above it
  };
  std::vector<Visit> todo;
  for (auto it = roots.rbegin(); it != roots.rend(); ++it) todo.push_back({*it, 0});
  while (!todo.empty()) {
    const auto [index, num_open] = todo.back();
    todo.pop_back();
    const auto& stretch = stretches[index];
    builder.close_to(num_open);
    builder.add_run(stretch.begin, stretch.end, stretch.is_leaf());
    for (auto it = stretch.children.rbegin(); it != stretch.children.rend(); ++it)
      todo.push_back({*it, builder.num_open()});
  }
  builder.close_to(0);
  plan.trees.push_back(std::move(planned));
  return plan;
}

Plan make_plan(std::string_view strategy, const std::vector<TokenSpan>& sequences,
               int64_t max_tokens_per_pass) {
  if (strategy == "dense") return plan_dense(sequences, max_tokens_per_pass);
  if (strategy == "path") return plan_path(sequences, max_tokens_per_pass);
  throw UserError(str("tree_training_mode: got ", quoted(strategy), ", expected dense or path"));
}

namespace {

void validate_tree(const PlannedTree& planned, int64_t max_tokens_per_pass) {
  const auto& tree = planned.tree;
  std::vector<int32_t> block_of(tree.num_tokens(), -1);
  for (size_t b = 0; b < planned.blocks.size(); ++b) {
    const auto& block = planned.blocks[b];
    int64_t count = 0;
    int32_t previous_end = -1;
    BOUGH_CHECK(!block.interior || block.ranges.size() == 1, "interior block ", b, " has ",
                block.ranges.size(), " ranges");
    for (const auto& range : block.ranges) {
      BOUGH_CHECK(range.begin >= previous_end && range.begin < range.end && range.end <= tree.num_tokens(),
                  "block ", b, " range ", range.begin, " to ", range.end);
      previous_end = range.end;
      for (int32_t t = range.begin; t < range.end; ++t) {
        BOUGH_CHECK(block_of[t] < 0, "token ", t, " lies in blocks ", block_of[t], " and ", b);
        BOUGH_CHECK(!block.interior || t == range.begin || tree.parent[t] == t - 1, "interior block ", b,
                    " branches at token ", t);
        block_of[t] = static_cast<int32_t>(b);
        ++count;
      }
    }
    BOUGH_CHECK(count == block.num_tokens && count <= max_tokens_per_pass, "block ", b, " has ", count,
                " tokens, says ", block.num_tokens, ", limit ", max_tokens_per_pass);
  }
  for (int64_t t = 0; t < tree.num_tokens(); ++t)
    BOUGH_CHECK(block_of[t] >= 0, "token ", t, " lies in no block");

  std::vector<int32_t> open;
  std::vector<int32_t> on_stack;  // tokens
  std::vector<bool> done(planned.blocks.size(), false);
  for (const auto& step : planned.steps) {
    const auto& block = planned.blocks[step.block];
    if (step.kind == Step::Kind::kBackward) {
      BOUGH_CHECK(!open.empty() && open.back() == step.block, "block ", step.block,
                  " is closed out of order");
      open.pop_back();
      on_stack.resize(on_stack.size() - block.num_tokens);
      done[step.block] = true;
      continue;
    }
    BOUGH_CHECK(!done[step.block] && block.interior == (step.kind == Step::Kind::kForward), "block ",
                step.block, " runs again, or as another kind");
    BOUGH_CHECK(block.above == (open.empty() ? -1 : open.back()) &&
                    block.stack_rows == static_cast<int64_t>(on_stack.size()),
                "block ", step.block, " expects ", block.stack_rows, " rows below it, the stack has ",
                on_stack.size());
    for (const auto& range : block.ranges)
      for (int32_t t = range.begin; t < range.end; ++t) {
        const int32_t p = tree.parent[t];
        if (p < 0 || block_of[p] == step.block) continue;
        // A path's depth is its row: the stack is one path from the root.
        BOUGH_CHECK(tree.depth[p] < static_cast<int32_t>(on_stack.size()) && on_stack[tree.depth[p]] == p,
                    "token ", t, " of block ", step.block, " hangs off token ", p,
                    ", which is not on the stack");
      }
    if (step.kind == Step::Kind::kForwardBackward) {
      done[step.block] = true;
      continue;
    }
    const auto& range = block.ranges[0];
    BOUGH_CHECK(tree.depth[range.begin] == static_cast<int32_t>(on_stack.size()), "interior block ",
                step.block, " begins at depth ", tree.depth[range.begin], ", the stack has ", on_stack.size(),
                " rows");
    open.push_back(step.block);
    for (int32_t t = range.begin; t < range.end; ++t) on_stack.push_back(t);
    BOUGH_CHECK(static_cast<int64_t>(on_stack.size()) <= planned.stack_capacity, "stack of ", on_stack.size(),
                " rows, capacity ", planned.stack_capacity);
  }
  BOUGH_CHECK(open.empty(), open.size(), " blocks are never closed");
  BOUGH_CHECK(std::all_of(done.begin(), done.end(), [](bool d) { return d; }), "a block never runs backward");
}

}  // namespace

void validate(const Plan& plan, const std::vector<TokenSpan>& sequences) {
  std::vector<int32_t> ends(sequences.size(), 0);
  for (const auto& planned : plan.trees) {
    std::vector<TokenSpan> own;
    for (const int64_t s : planned.sequences) {
      ++ends[s];
      own.push_back(sequences[s]);
    }
    planned.tree.check_integrity(own);
    validate_tree(planned, plan.max_tokens_per_pass);
  }
  for (size_t s = 0; s < ends.size(); ++s)
    BOUGH_CHECK(ends[s] == 1, "sequence ", s, " ends in ", ends[s], " trees");
}

Simulation simulate(const Plan& plan) {
  Simulation result;
  for (const auto& planned : plan.trees) {
    result.peak_stack_tokens = std::max(result.peak_stack_tokens, planned.stack_capacity);
    for (const auto& step : planned.steps) {
      const auto& block = planned.blocks[step.block];
      ++result.num_passes;
      (step.kind == Step::Kind::kBackward ? result.tokens_recomputed : result.tokens_forwarded) +=
          block.num_tokens;
      result.peak_pass_tokens = std::max(result.peak_pass_tokens, block.num_tokens);
    }
  }
  return result;
}

}  // namespace bough

// validate(): the invariants of a plan.
#include <algorithm>

#include "base/error.h"
#include "plan/plan.h"

namespace bough {

namespace {

void validate_tree(const PlannedTree& planned, int64_t max_tokens_per_pass) {
  const auto& tree = *planned.tree;
  std::vector<int32_t> block_of(tree.num_tokens(), -1);
  for (size_t b = 0; b < planned.blocks.size(); ++b) {
    const auto& block = planned.blocks[b];
    int64_t count = 0;
    int32_t previous_end = -1;
    BOUGH_CHECK(!block.interior || block.ranges.size() == 1, "interior block ", b, " has ",
                block.ranges.size(), " ranges");
    for (const auto& range : block.ranges) {
      BOUGH_CHECK(range.begin >= previous_end && range.begin < range.end && range.end <= tree.num_tokens(),
                  "block ", b, " has an empty, overlapping or too long range: ", range.begin, " to ",
                  range.end);
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
                " tokens, its num_tokens is ", block.num_tokens, ", the limit ", max_tokens_per_pass);
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
                  " runs backward out of order");
      open.pop_back();
      on_stack.resize(on_stack.size() - block.num_tokens);
      done[step.block] = true;
      continue;
    }
    BOUGH_CHECK(!done[step.block] && block.interior == (step.kind == Step::Kind::kForward), "block ",
                step.block, " runs twice, or in a step of the wrong kind");
    BOUGH_CHECK(block.above == (open.empty() ? -1 : open.back()) &&
                    block.stack_rows == static_cast<int64_t>(on_stack.size()),
                "block ", step.block, " expects ", block.stack_rows, " stack rows below block ", block.above,
                ", the stack has ", on_stack.size());
    for (const auto& range : block.ranges)
      for (int32_t t = range.begin; t < range.end; ++t) {
        const int32_t p = tree.parent[t];
        if (p < 0 || block_of[p] == step.block) continue;
        // The token at index d of the stack has depth d, because the stack is one path from the root.
        BOUGH_CHECK(tree.depth[p] < static_cast<int32_t>(on_stack.size()) && on_stack[tree.depth[p]] == p,
                    "token ", t, " of block ", step.block, " has parent ", p,
                    ", which is not on the prefix KV stack");
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
    BOUGH_CHECK(static_cast<int64_t>(on_stack.size()) <= planned.stack_capacity, "the stack has ",
                on_stack.size(), " rows, its capacity is ", planned.stack_capacity);
  }
  BOUGH_CHECK(open.empty(), open.size(), " interior blocks never run backward");
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
    planned.tree->check_integrity(own);
    validate_tree(planned, plan.max_tokens_per_pass);
  }
  for (size_t s = 0; s < ends.size(); ++s)
    BOUGH_CHECK(ends[s] == 1, "sequence ", s, " is in ", ends[s], " trees, expected 1");
}

}  // namespace bough

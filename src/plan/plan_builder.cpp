#include "plan/plan_builder.h"

#include <algorithm>

namespace bough {

PlannedTree PlanBuilder::finish(const IndexedTree& indexed) {
  planned_.tree = indexed.tree;
  planned_.sequences = indexed.sequences;
  return finish();
}

void PlanBuilder::add_run(int32_t begin, int32_t end, bool is_leaf) {
  const int64_t count = end - begin;
  const int64_t num_chunks = (count + limit_ - 1) / limit_;
  for (int64_t i = 0; i < num_chunks; ++i) {
    const TokenRange range{static_cast<int32_t>(begin + count * i / num_chunks),
                           static_cast<int32_t>(begin + count * (i + 1) / num_chunks)};
    if (is_leaf && i == num_chunks - 1) add_leaf({range});
    else push(range);
  }
}

void PlanBuilder::add_leaf(std::vector<TokenRange> ranges) {
  const int32_t block = add_block(false, std::move(ranges));
  planned_.steps.push_back({Step::Kind::kForwardBackward, block});
}

void PlanBuilder::close_to(size_t count) {
  while (open_.size() > count) {
    const int32_t block = open_.back();
    open_.pop_back();
    stack_rows_ -= planned_.blocks[block].num_tokens;
    planned_.steps.push_back({Step::Kind::kBackward, block});
  }
}

PlannedTree PlanBuilder::finish() {
  close_to(0);
  return std::move(planned_);
}

void PlanBuilder::push(TokenRange range) {
  planned_.stack_capacity = std::max(planned_.stack_capacity, stack_rows_ + range.size());
  const int32_t block = add_block(true, {range});
  planned_.steps.push_back({Step::Kind::kForward, block});
  open_.push_back(block);
  stack_rows_ += range.size();
}

void PlanBuilder::check_memory(const PassShape& pass) {
  if (!costs_ || !fits_) return;
  const int64_t bytes = planned_.stack_capacity * costs_->stack_row_bytes() +
                        pass.tokens * costs_->activation_bytes() + costs_->temporary_bytes(pass);
  fits_ = bytes <= room_;
}

bool PlanBuilder::has_room_for(int64_t num_tokens) {
  check_memory({.tokens = num_tokens});
  return fits_;
}

int32_t PlanBuilder::add_block(bool interior, std::vector<TokenRange> ranges) {
  Block block;
  block.interior = interior;
  block.above = top();
  block.stack_rows = stack_rows_;
  block.needed = false;
  for (const auto& range : ranges) {
    block.num_tokens += range.size();
    block.num_pairs += view_.num_pairs(range);
    block.num_head_rows += view_.num_trained(range);
    block.num_loss_rows += view_.num_rows(range);
    block.num_pieces += view_.num_pieces(range);
    // Each subtree of the range hangs off the stack: its tokens see all rows down to there.
    for (int32_t t = range.begin, end; t < range.end; t = end) {
      end = std::min(view_.subtree_end(t), range.end);
      block.num_stack_pairs += int64_t{end - t} * view_.depth(t);
    }
    // Of a leaf block all that can train lies in it; of an interior one below its first token.
    const int32_t end = interior ? view_.subtree_end(range.begin) : range.end;
    block.needed |= view_.num_trained({range.begin, end}) > 0;
  }
  if (interior) {
    // A token's hidden state leaves the block through each child that trains and lies elsewhere.
    const auto [begin, end] = ranges.front();
    for (int32_t t = begin; t < end; ++t) {
      bool leaves = false;
      int32_t child = t + 1;
      if (child < end) child = view_.subtree_end(child);  // the block's own continuation
      for (; child < view_.subtree_end(t) && !leaves; child = view_.subtree_end(child))
        leaves = view_.trains(child);
      block.num_exits += leaves;
    }
  }
  block.ranges = std::move(ranges);
  if (block.needed) check_memory(block.shape());
  planned_.blocks.push_back(std::move(block));
  return static_cast<int32_t>(planned_.blocks.size()) - 1;
}

}  // namespace bough

#include "plan/plan_builder.h"

#include <algorithm>

namespace bough {

void PlanWriter::begin_tree(const std::vector<int64_t>& sequences, int64_t stack_capacity) {
  trees_.push_back({.sequences = sequences, .stack_capacity = stack_capacity});
  stack_rows_ = 0;
}

void PlanWriter::push(Block block) {
  auto& planned = trees_.back();
  stack_rows_ += block.num_tokens;
  planned.stack_capacity = std::max(planned.stack_capacity, stack_rows_);
  const int32_t index = add(std::move(block));
  planned.steps.push_back({Step::Kind::kForward, index});
  open_.push_back(index);
}

void PlanWriter::add_leaf(Block block) {
  const int32_t index = add(std::move(block));
  trees_.back().steps.push_back({Step::Kind::kForwardBackward, index});
}

void PlanWriter::pop() {
  auto& planned = trees_.back();
  planned.steps.push_back({Step::Kind::kBackward, open_.back()});
  stack_rows_ -= planned.blocks[open_.back()].num_tokens;
  open_.pop_back();
}

int32_t PlanWriter::add(Block block) {
  auto& blocks = trees_.back().blocks;
  block.above = open_.empty() ? -1 : open_.back();
  blocks.push_back(std::move(block));
  return static_cast<int32_t>(blocks.size()) - 1;
}

void PlanBuilder::add_run(int32_t begin, int32_t end, bool is_leaf) {
  const int64_t count = end - begin;
  const int64_t num_chunks = (count + limit_ - 1) / limit_;
  for (int64_t i = 0; i < num_chunks; ++i) {
    const TokenRange range{static_cast<int32_t>(begin + count * i / num_chunks),
                           static_cast<int32_t>(begin + count * (i + 1) / num_chunks)};
    if (is_leaf && i == num_chunks - 1) {
      add_leaf({range});
      continue;
    }
    Block block = measured(true, {range});
    const bool needed = block.needed;
    const PassShape shape = block.shape();
    writer_.push(std::move(block));
    if (needed) check_memory(shape);  // checks the stack, which now has this block's tokens
  }
}

void PlanBuilder::add_leaf(std::vector<TokenRange> ranges) {
  Block block = measured(false, std::move(ranges));
  if (block.needed) check_memory(block.shape());
  writer_.add_leaf(std::move(block));
}

void PlanBuilder::close_to(size_t count) {
  while (num_open() > count) writer_.pop();
}

PlannedTree PlanBuilder::finish() {
  close_to(0);
  return std::move(writer_.finish().front());
}

void PlanBuilder::check_memory(const PassShape& pass) {
  if (!costs_ || !fits_) return;
  const int64_t stack = writer_.stack_capacity() * costs_->stack_row_bytes();
  fits_ = stack + least_pass_bytes(*costs_, pass, rules_) <= room_;
}

bool PlanBuilder::has_room_for(int64_t num_tokens) {
  check_memory({.tokens = num_tokens});
  return fits_;
}

Block PlanBuilder::measured(bool interior, std::vector<TokenRange> ranges) const {
  Block block;
  block.interior = interior;
  if (interior) block.keep = RecomputePolicy::kKeysValues;
  block.stack_rows = writer_.stack_rows();
  block.needed = false;
  for (const auto& range : ranges) {
    block.num_tokens += range.size();
    block.num_pairs += view_.num_pairs(range);
    block.num_head_rows += view_.num_trained(range);
    block.num_loss_rows += view_.num_rows(range);
    block.num_pieces += view_.num_pieces(range);
    // Each subtree of the range hangs off a token of the stack. Its tokens attend to all stack tokens from
    // the root down to that token.
    for (int32_t t = range.begin, end; t < range.end; t = end) {
      end = std::min(view_.subtree_end(t), range.end);
      block.num_stack_pairs += int64_t{end - t} * view_.depth(t);
    }
    // A leaf block must run (`needed`) if a token of the block is trained. An interior block must run if a
    // token of the subtree of its first token is trained.
    const int32_t end = interior ? view_.subtree_end(range.begin) : range.end;
    block.needed |= view_.num_trained({range.begin, end}) > 0;
  }
  if (interior) {
    // Counts the tokens with a trained child in another block, which reads the token's final hidden state.
    const auto [begin, end] = ranges.front();
    for (int32_t t = begin; t < end; ++t) {
      bool leaves = false;
      int32_t child = t + 1;
      if (child < end) child = view_.subtree_end(child);  // skips the block's own continuation
      for (; child < view_.subtree_end(t) && !leaves; child = view_.subtree_end(child))
        leaves = view_.trains(child);
      block.num_boundary_tokens += leaves;
    }
  }
  block.ranges = std::move(ranges);
  return block;
}

}  // namespace bough

// Where a strategy's blocks go, in the order of its walk: into a plan (PlanWriter), or past a simulator that
// prices and forgets them (simulator.h), so that neither trees nor lists of blocks are made only to learn
// what a plan would cost.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace bough {

class BlockSink {
 public:
  virtual ~BlockSink() = default;

  // A tree of these of the batch's sequences. stack_capacity: rows of its deepest chain of interior blocks.
  virtual void begin_tree(const std::vector<int64_t>& sequences, int64_t stack_capacity) = 0;
  virtual void push(Block block) = 0;  // interior: it stays open
  virtual void add_leaf(Block block) = 0;
  virtual void pop() = 0;                           // closes the last open one
  virtual bool is_enough() const { return false; }  // nobody looks at what comes after
};

// A plan under construction: trees of blocks and steps, without their prefix trees.
class PlanWriter final : public BlockSink {
 public:
  void begin_tree(const std::vector<int64_t>& sequences, int64_t stack_capacity) override;
  void push(Block block) override;
  void add_leaf(Block block) override;
  void pop() override;

  size_t num_open() const { return open_.size(); }
  const Block& open_block(size_t index) const { return trees_.back().blocks[open_[index]]; }
  int64_t stack_rows() const { return stack_rows_; }
  int64_t stack_capacity() const { return trees_.back().stack_capacity; }
  std::vector<PlannedTree> finish() { return std::move(trees_); }  // with all blocks closed

 private:
  int32_t add(Block block);

  std::vector<PlannedTree> trees_;
  std::vector<int32_t> open_;
  int64_t stack_rows_ = 0;
};

}  // namespace bough

// BlockSink: receives the blocks that a strategy makes, in the order of plan execution.
//   - PlanWriter stores the blocks in a plan.
//   - Simulator (simulator.h) adds up their cost and stores nothing, so pricing a plan needs little memory.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace bough {

class BlockSink {
 public:
  virtual ~BlockSink() = default;

  // Starts a tree. sequences: indices in the batch. stack_capacity: largest number of tokens that a chain of
  // interior blocks puts on the prefix KV stack at once.
  virtual void begin_tree(const std::vector<int64_t>& sequences, int64_t stack_capacity) = 0;
  virtual void push(Block block) = 0;  // opens an interior block: until its pop(), blocks lie below it
  virtual void add_leaf(Block block) = 0;
  virtual void pop() = 0;                           // closes the last open interior block
  virtual bool is_enough() const { return false; }  // true: the caller may stop; later blocks have no effect
};

// A plan under construction: trees with blocks and steps. PlannedTree::tree stays nullptr; the strategy sets
// it afterwards.
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
  std::vector<PlannedTree> finish() { return std::move(trees_); }  // all blocks must be closed

 private:
  int32_t add(Block block);

  std::vector<PlannedTree> trees_;
  std::vector<int32_t> open_;
  int64_t stack_rows_ = 0;
};

}  // namespace bough

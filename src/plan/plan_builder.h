// Builds plans of the strategies `path` and `blocks`. Counts tokens, (query, key) pairs and loss rows of each
// block, and keeps the chain of open interior blocks (blocks whose keys and values lie on the stack).
#pragma once

#include <utility>
#include <vector>

#include "plan/block_sink.h"
#include "plan/indexed_tree.h"
#include "plan/recompute_policy.h"

namespace bough {

class PlanBuilder {
 public:
  PlanBuilder(TreeView view, int64_t max_tokens_per_pass)
      : view_(std::move(view)), limit_(max_tokens_per_pass) {
    writer_.begin_tree({}, 0);
  }

  // Sets a memory bound. fits() becomes false once the bytes of the stack plus the least bytes of one pass
  // exceed `room`. The sum is a lower bound of the plan's peak, so plans that are too large are given up
  // early.
  void bound_memory(const PassCosts& costs, int64_t room, const RecomputeRules& rules) {
    costs_ = &costs;
    room_ = room;
    rules_ = rules;
  }
  bool fits() const { return fits_; }
  bool has_room_for(int64_t num_tokens);  // checks a pass of this size; if it is too large, fits() is false

  size_t num_open() const { return writer_.num_open(); }
  TokenRange open_range(size_t index) const { return writer_.open_block(index).ranges.front(); }

  // Adds tokens [begin, end) in even chunks of at most max_tokens_per_pass. With `is_leaf` the last chunk is
  // a leaf block. All other chunks are interior blocks and stay open.
  void add_run(int32_t begin, int32_t end, bool is_leaf);

  void add_leaf(std::vector<TokenRange> ranges);  // in pre-order

  // Closes open blocks, last first, until `count` are left.
  void close_to(size_t count);
  PlannedTree finish();  // closes all blocks; the result has no tree and no sequences

 private:
  Block measured(bool interior, std::vector<TokenRange> ranges) const;
  void check_memory(const PassShape& pass);

  TreeView view_;
  PlanWriter writer_;
  int64_t limit_;
  const PassCosts* costs_ = nullptr;
  int64_t room_ = 0;
  RecomputeRules rules_;
  bool fits_ = true;
};

}  // namespace bough

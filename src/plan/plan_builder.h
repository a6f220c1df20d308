// What the strategies share: the walk that becomes a plan.
#pragma once

#include <utility>
#include <vector>

#include "plan/tree_view.h"

namespace bough {

// Appends blocks and steps in the order of a walk; keeps the chain of open interior blocks.
class PlanBuilder {
 public:
  PlanBuilder(TreeView view, int64_t max_tokens_per_pass)
      : view_(std::move(view)), limit_(max_tokens_per_pass) {}

  // From then on fits() says whether each pass, whatever is kept beside it, takes at most `room` bytes together with
  // the stack: a lower bound of the plan's peak, known while the plan is made.
  void bound_memory(const PassCosts& costs, int64_t room) {
    costs_ = &costs;
    room_ = room;
  }
  bool fits() const { return fits_; }
  bool has_room_for(int64_t num_tokens);  // for a pass of at least so many; if not, nothing fits() any more

  int64_t stack_rows() const { return stack_rows_; }
  size_t num_open() const { return open_.size(); }
  TokenRange open_range(size_t index) const { return planned_.blocks[open_[index]].ranges.front(); }
  int32_t top() const { return open_.empty() ? -1 : open_.back(); }

  // Tokens [begin, end) in even chunks of at most B. With `is_leaf` the last chunk is a leaf block; all others are
  // pushed and stay open.
  void add_run(int32_t begin, int32_t end, bool is_leaf);

  void add_leaf(std::vector<TokenRange> ranges);  // in pre-order

  // Closes open blocks, last first, until `count` are left.
  void close_to(size_t count);
  PlannedTree finish();  // with all closed; without tree and sequences
  PlannedTree finish(const IndexedTree& indexed);

 private:
  void push(TokenRange range);
  int32_t add_block(bool interior, std::vector<TokenRange> ranges);
  void check_memory(const PassShape& pass);

  TreeView view_;
  PlannedTree planned_;
  int64_t limit_;
  std::vector<int32_t> open_;
  int64_t stack_rows_ = 0;
  const PassCosts* costs_ = nullptr;
  int64_t room_ = 0;
  bool fits_ = true;
};

}  // namespace bough

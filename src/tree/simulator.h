// The steps of a plan in turn: their seconds, and what is held beside the stack. For plans that exist (simulate), and
// for those that are priced before they are built (outline.h).
#pragma once

#include "tree/plan.h"

namespace bough {

class Simulator {
 public:
  explicit Simulator(const CostModel* costs) : costs_(costs) {}

  void begin_tree(int64_t stack_capacity);
  void step(Step::Kind kind, const Block& block);  // the block's ranges are not looked at
  Simulation finish() const;                       // with what the whole walk holds: rows of the batch's loss

 private:
  void forward(const Block& block);
  void leaf(const Block& block);
  void backward(const Block& block);
  double head_seconds(const PassShape& shape) const;
  int64_t kept_of(const Block& block) const;
  void hold(int64_t pass_tokens);
  void hold_bytes(int64_t pass_bytes);

  const CostModel* costs_;
  Simulation result_;
  int64_t stack_bytes_ = 0;
  int64_t kept_bytes_ = 0;
  int64_t kept_tokens_ = 0;
  int64_t num_loss_rows_ = 0;
};

}  // namespace bough

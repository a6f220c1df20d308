// The steps of a plan in turn: their seconds, and what is held beside the stack. For plans that exist
// (simulate), and as a sink for those that are priced before they are built.
#pragma once

#include <limits>

#include "plan/block_sink.h"

namespace bough {

class Simulator final : public BlockSink {
 public:
  // budget, most_seconds: once the peak or the time is above them, seconds are not summed any further: nobody
  // asks what a plan that does not fit would take, nor how much slower a slower one is.
  explicit Simulator(const PassCosts* costs, std::optional<int64_t> budget = {},
                     double most_seconds = std::numeric_limits<double>::infinity())
      : costs_(costs),
        budget_(budget.value_or(std::numeric_limits<int64_t>::max())),
        most_seconds_(most_seconds) {}

  void begin_tree(const std::vector<int64_t>& sequences, int64_t stack_capacity) override;
  void push(Block block) override;
  void add_leaf(Block block) override { step(Step::Kind::kForwardBackward, block); }
  void pop() override;
  bool is_enough() const override { return result_.peak_bytes > budget_; }

  void step(Step::Kind kind, const Block& block);  // the block's ranges are not looked at
  Simulation finish() const;                       // with what the whole walk holds: rows of the batch's loss

 private:
  void forward(const Block& block);
  void leaf(const Block& block);
  void backward(const Block& block);
  int64_t kept_of(const Block& block) const;
  void hold(int64_t pass_tokens);
  bool is_timed(int64_t pass_bytes);  // with these held for a pass

  const PassCosts* costs_;
  int64_t budget_;
  double most_seconds_;
  Simulation result_;
  int64_t stack_bytes_ = 0;
  int64_t kept_bytes_ = 0;
  int64_t kept_tokens_ = 0;
  int64_t num_loss_rows_ = 0;
  std::vector<Block> open_;
};

Simulation simulate(const Plan& plan, const PassCosts* costs, std::optional<int64_t> budget,
                    double most_seconds = std::numeric_limits<double>::infinity());

}  // namespace bough

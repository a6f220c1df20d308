// Adds up seconds, memory and tokens over the steps of a plan. Used for complete plans (simulate), and as a
// BlockSink for plans that are priced before they are built.
#pragma once

#include <limits>

#include "plan/block_sink.h"

namespace bough {

class Simulator final : public BlockSink {
 public:
  // costs: nullptr if there is no cost model. Must outlive this object.
  // budget (bytes), most_seconds: once the plan's peak or time exceeds them, seconds are no longer added up.
  // The caller rejects such a plan, so its exact time does not matter.
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

  void step(Step::Kind kind, const Block& block);  // does not read block.ranges
  Simulation finish() const;                       // adds the bytes of all loss rows to the peak

 private:
  void forward(const Block& block);
  void leaf(const Block& block);
  void backward(const Block& block);
  int64_t kept_of(const Block& block) const;
  void hold(int64_t pass_tokens);
  bool is_timed(int64_t pass_bytes);  // updates the peak; false: seconds are no longer added up

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

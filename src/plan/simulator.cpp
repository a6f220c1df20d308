#include "plan/simulator.h"

#include <algorithm>

#include "plan/recompute_policy.h"

namespace bough {

void Simulator::begin_tree(const std::vector<int64_t>&, int64_t stack_capacity) {
  result_.peak_stack_tokens = std::max(result_.peak_stack_tokens, stack_capacity);
  stack_bytes_ = costs_ ? stack_capacity * costs_->stack_row_bytes() : 0;
}

void Simulator::push(Block block) {
  step(Step::Kind::kForward, block);
  open_.push_back(std::move(block));
}

void Simulator::pop() {
  step(Step::Kind::kBackward, open_.back());
  open_.pop_back();
}

void Simulator::step(Step::Kind kind, const Block& block) {
  if (!block.needed) return;
  if (kind != Step::Kind::kForward) {
    num_loss_rows_ += block.num_loss_rows;
    result_.num_on_host += block.keep == RecomputePolicy::kLayerInputsOnHost;
  }
  ++result_.num_passes;
  result_.peak_pass_tokens = std::max(result_.peak_pass_tokens, block.num_tokens);
  if (kind == Step::Kind::kForward) forward(block);
  else if (kind == Step::Kind::kForwardBackward) leaf(block);
  else backward(block);
}

Simulation Simulator::finish() const {
  auto result = result_;
  if (costs_) result.peak_bytes += num_loss_rows_ * costs_->row_bytes();
  return result;
}

void Simulator::forward(const Block& block) {
  result_.tokens_forwarded += block.num_tokens;
  const bool all = block.keep == RecomputePolicy::kActivations;
  if (all) kept_tokens_ += block.num_tokens;
  hold(0);
  if (!costs_) return;
  const auto shape = block.shape();
  kept_bytes_ += kept_of(block);
  if (is_timed(costs_->temporary_bytes(shape, RecomputePolicy::kActivations)))
    result_.seconds += costs_->forward_seconds(shape);
}

void Simulator::leaf(const Block& block) {
  result_.tokens_forwarded += block.num_tokens;
  const bool by_layer = recomputes_layers(block.keep);
  if (by_layer) result_.tokens_recomputed += block.num_tokens;
  hold(by_layer ? 0 : block.num_tokens);
  if (!costs_) return;
  if (is_timed(pass_bytes(*costs_, block, block.keep)))
    result_.seconds += costs_->forward_seconds(block.shape()) + backward_seconds(*costs_, block);
}

void Simulator::backward(const Block& block) {
  const bool all = block.keep == RecomputePolicy::kActivations;
  if (!all) result_.tokens_recomputed += block.num_tokens;
  hold(all || recomputes_layers(block.keep) ? 0 : block.num_tokens);
  if (all) kept_tokens_ -= block.num_tokens;
  if (!costs_) return;
  if (is_timed(pass_bytes(*costs_, block, block.keep))) result_.seconds += backward_seconds(*costs_, block);
  kept_bytes_ -= kept_of(block);
}

int64_t Simulator::kept_of(const Block& block) const {
  return block.num_boundary_tokens * costs_->boundary_bytes() +
         block.num_tokens * costs_->kept_bytes(block.keep);
}

void Simulator::hold(int64_t pass_tokens) {
  result_.peak_kept_tokens = std::max(result_.peak_kept_tokens, kept_tokens_ + pass_tokens);
}

bool Simulator::is_timed(int64_t pass_bytes) {
  result_.peak_bytes = std::max(result_.peak_bytes, stack_bytes_ + kept_bytes_ + pass_bytes);
  return result_.peak_bytes <= budget_ && result_.seconds <= most_seconds_;
}

Simulation simulate(const Plan& plan, const PassCosts* costs, std::optional<int64_t> budget,
                    double most_seconds) {
  Simulator simulator(costs, budget, most_seconds);
  for (const auto& planned : plan.trees) {
    simulator.begin_tree(planned.sequences, planned.stack_capacity);
    for (const auto& step : planned.steps) simulator.step(step.kind, planned.blocks[step.block]);
  }
  return simulator.finish();
}

Simulation simulate(const Plan& plan, const PassCosts* costs) {
  return simulate(plan, costs, std::nullopt);
}

}  // namespace bough

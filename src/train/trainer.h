// One batch of scored trajectories to one update of the weights: plan, gradients, optimizer, one or several
// mini-batches. With several, pi_old is computed for the whole batch before the first.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "report/metrics.h"
#include "train/gradient_step.h"
#include "train/optimizer.h"
#include "train/settings.h"

namespace bough {

// What a step is predicted to cost on this device; the room `cost` knows it.
struct StepCosts {
  std::shared_ptr<const PassCosts> passes;  // none: plans are made without
  WorkModel work;
  double matrix_product_rate = 0;  // FLOP/s of the device; 0: not known
};

class BatchTrainer {
 public:
  virtual ~BatchTrainer() = default;

  // Updates the weights from sequences that have an advantage; those that are not trained take no part in
  // anything. Metrics under the names of docs/formats.md. A batch without a trained token changes nothing.
  virtual MetricValues train(const std::vector<Trajectory>& batch) = 0;

  // The trainer's version i from now on: how many batches it has been trained on. To be said before train()
  // where a token's age counts.
  virtual void set_version(int64_t) {}
};

class Trainer final : public BatchTrainer {
 public:
  // model, and reference where the loss needs one, must outlive it. `total_steps`: calls of train() planned
  // for the whole run, which the learning rate's schedule follows.
  Trainer(Model& model, Model* reference, const ActorSettings& settings, int64_t total_steps,
          const Clock& clock);

  MetricValues train(const std::vector<Trajectory>& batch) override;
  void set_version(int64_t version) override { gradient_.set_version(version); }

  // What plans are made from; without it `auto` is `blocks` with passes of B tokens.
  void use_costs(StepCosts costs);
  const PassCosts* pass_costs() const { return costs_.passes.get(); }

  Optimizer& optimizer() { return optimizer_; }

 private:
  const ActorSettings settings_;
  GradientStep gradient_;
  Optimizer optimizer_;
  const Clock& clock_;
  StepCosts costs_;
};

// Metrics of a batch's tree: what it shares, and what the plans compute of it (AReaL's tree_token_ratio,
// under its name) and compute again. With a cost model, also what they were predicted to take over the
// `seconds` they took.
MetricValues tree_metrics(const PrefixTree& tree, const std::vector<const Plan*>& plans,
                          const PassCosts* costs = nullptr, double seconds = 0);

}  // namespace bough

// One batch of scored rollouts to one update of the weights: plan, gradients, optimizer, one or several
// mini-batches.
//
// pi_old (algorithms.md): with one mini-batch it is the current policy, detached, and costs nothing; with
// several its log-probabilities are computed for the whole batch before the first, and stay.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "report/metrics.h"
#include "train/executor.h"
#include "train/optimizer.h"
#include "train/settings.h"
#include "data/rollout_file.h"

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

  // Updates the weights from sequences that have an advantage; those that are not trained take no part in anything.
  // Metrics under the names of docs/formats.md. A batch without a trained token changes nothing.
  virtual MetricValues train(const std::vector<Trajectory>& batch) = 0;
};

class Trainer final : public BatchTrainer {
 public:
  // model, and reference where the loss needs one, must outlive it. `total_steps`: calls of train() planned
  // for the whole run, which the learning rate's schedule follows.
  Trainer(Model& model, Model* reference, const ActorSettings& settings, int64_t total_steps,
          const Clock& clock);

  MetricValues train(const std::vector<Trajectory>& batch) override;

  // Seconds that gradient of the whole batch takes under `strategy`; weights and optimizer stay as they are,
  // gradients are zero afterwards.
  double time_gradient(const std::vector<Trajectory>& batch, const std::string& strategy);

  // What plans are made from; without it `auto` is `blocks` with passes of B tokens.
  void use_costs(StepCosts costs) { costs_ = std::move(costs); }

  Optimizer& optimizer() { return optimizer_; }
  bool needs_reference() const { return loss_->needs_reference(); }

 private:
  struct MiniBatch;
  MiniBatch make_mini_batch(const std::vector<Trajectory>& batch, const std::vector<int64_t>& members) const;
  void fill_fixed_fields(MiniBatch& mini, bool proximal_is_current);
  Plan plan_of(const MiniBatch& mini, const std::string& strategy) const;

  Model& model_;
  Model* reference_;
  const ActorSettings settings_;
  std::unique_ptr<Loss> loss_;
  Optimizer optimizer_;
  Executor executor_;
  const Clock& clock_;
  StepCosts costs_;
};

// Metrics tree/* of a batch: what its prefix tree shares and what the plans recompute. With a cost model, also what
// they were predicted to take over the `seconds` they took.
MetricValues tree_metrics(const PrefixTree& tree, const std::vector<const Plan*>& plans,
                          const PassCosts* costs = nullptr, double seconds = 0);

}  // namespace bough

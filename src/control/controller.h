// The run's loop. Synchronous: one thread does one thing after the other, and nobody waits for anybody.
//
//   ┌──────────────────────────────── Controller::step() ─────────────────────────────────┐
//   │ problems ─▶ prompts ─▶ Engine ─▶ completions ─▶ RewardFunction ─▶ shaping, filters, │
//   │ (ProblemOrder)         (step() until all are done)  (blocks on its workers)  advantages
//   │                                                                               │     │
//   │      Engine::update_weights(version + 1)  ◀── weights ◀── BatchTrainer::train ◀┘     │
//   └──────────────────────────────────────────────────────────────────────────────────────┘
//
// The engine shares the trainer's weights, so publishing is saying their new version number; the engine is
// idle by then. The stop flag is looked at between two passes of the engine: a stop before training begins
// abandons the step (the controller's state is as before it, the step will be drawn again, the same); once
// training has begun the step is finished. What step n draws is a function of (seed, n, weights), not of what
// the process did before.
//
// State that outlives the process: save()/restore(), beside weights and optimizer.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "control/prompt_encoder.h"
#include "control/run_settings.h"
#include "env/reward.h"
#include "report/metrics.h"
#include "rollout/engine.h"
#include "train/trainer.h"

namespace bough {

struct ControllerParts {
  const RunSettings& settings;
  const Dataset& problems;
  const PromptEncoder& encoder;
  Engine& engine;
  RewardFunction& reward;
  BatchTrainer& trainer;
  const Clock& clock;
};

struct StepRecord {
  int64_t step = 0;  // 1 is the first
  MetricValues metrics;
  std::vector<Trajectory> batch;  // with prompt, completion and answer
};

class Controller {
 public:
  // All parts must outlive it.
  explicit Controller(const ControllerParts& parts);

  using Activity = std::function<void(const std::string&)>;  // "rollout 37/128"
  // One step, or nullopt where `stop` said so before training began. Both functions may be empty.
  std::optional<StepRecord> step(const std::function<bool()>& stop = {}, const Activity& activity = {});

  int64_t num_steps() const { return num_steps_; }  // done, since the run began

  Json save() const;
  // UserError where the state is of other problems or another seed (ProblemOrder::restore).
  void restore(const Json& state);

 private:
  struct Sampled;
  std::optional<Sampled> sample(const std::function<bool()>& stop, const Activity& activity);
  void score(Sampled& sampled, MetricValues& metrics);
  std::vector<Trajectory> make_batch(Sampled sampled, MetricValues& metrics) const;

  ControllerParts parts_;
  ProblemOrder order_;
  int64_t num_steps_ = 0;
};

}  // namespace bough

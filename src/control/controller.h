// The run's schedule of steps: generate a batch, train on it, publish the weights. Synchronous: one thread
// does one thing after the other, and nobody waits for anybody. It is the asynchronous schedule with eta = 0:
// the gate lets a batch begin when the one before it was trained on.
//
//   ┌───────────────────────────────────── Controller::step() ───────────────────────────────────────┐
//   │ problems ─▶ Generator ⇄ Engine  ─▶ RewardFunction ─▶ ReplayBuffer ─▶ shaping, filters,         │
//   │ (ProblemOrder)  ▲  (until B groups    (blocks on       (B groups,    advantages ─▶ BatchTrainer │
//   │                 │   have finished)     its workers)    oldest first)                     │     │
//   │           StalenessGate ◀── version + 1 ◀── Engine::update_weights ◀── weights ◀─────────┘     │
//   └─────────────────────────────────────────────────────────────────────────────────────────────────┘
//
// Nothing is in flight in the engine while weights are published. The stop flag is looked at between two
// passes of the engine: a stop before training begins abandons the step (the controller's state is as before
// it, the step will be drawn again, the same); once training has begun the step is finished. What step n
// draws is a function of (seed, n, weights), not of what the process did before.
//
// State that outlives the process: save()/restore(), beside weights and optimizer.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "control/generator.h"
#include "control/run_settings.h"
#include "env/reward.h"
#include "report/metrics.h"
#include "rollout/engine.h"
#include "train/trainer.h"

namespace bough {

struct ControllerParts {
  const RunSettings& settings;
  const Dataset& problems;
  const TextCodec& encoder;
  Engine& engine;
  RewardFunction& reward;
  BatchTrainer& trainer;
  const Clock& clock;
  const Model* model = nullptr;  // what is trained and published to the engine; none where an engine has none
};

struct StepRecord {
  int64_t step = 0;  // 1 is the first
  MetricValues metrics;
  std::vector<Trajectory> batch;  // with prompt, completion and answer
};

class Controller {
 public:
  // All parts must outlive the controller.
  explicit Controller(const ControllerParts& parts);
  Controller(const Controller&) = delete;
  Controller& operator=(const Controller&) = delete;

  using Activity = std::function<void(const std::string&)>;  // "rollout 37/128"
  // Takes one step; nullopt where `stop` said so before training began. Both functions may be empty.
  std::optional<StepRecord> step(const std::function<bool()>& stop = {}, const Activity& activity = {});

  int64_t num_steps() const { return num_steps_; }  // done, since the run began

  Json save() const;
  // UserError where the state is of other problems or another seed (ProblemOrder::restore).
  void restore(const Json& state);

 private:
  std::optional<GroupTask> next_task();
  void begin_step();
  void publish();
  void tell_rewards(const std::vector<FinishedGroup>& groups, MetricValues& metrics) const;
  std::vector<Trajectory> make_batch(std::vector<FinishedGroup> groups, MetricValues& metrics) const;

  ControllerParts parts_;
  ProblemOrder order_;
  StalenessGate gate_;
  ReplayBuffer buffer_;
  Generator generator_;
  int64_t num_steps_ = 0;
  int64_t next_position_ = 0;  // in the order of problems, and the id of the next group
};

}  // namespace bough

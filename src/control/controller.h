// The run's schedule of steps: take a batch of groups from the replay buffer, train on it, publish the
// weights. What fills the buffer is RolloutWorker (rollout_worker.h, which draws the threads).
//
//   ┌──────────────────────────────────── Controller::step() ────────────────────────────────────────┐
//   │ problems ─▶ RolloutWorker: Generator ⇄ Engine ─▶ RewardFunction ─▶ ReplayBuffer                │
//   │ (ProblemOrder)  ▲                                                  (B groups, oldest first)     │
//   │                 │ version                                               │                      │
//   │           StalenessGate ◀── engine takes weights ◀── publish ◀── BatchTrainer ◀── advantages ◀──┘
//   └─────────────────────────────────────────────────────────────────────────────────────────────────┘
//
// rollout.max_head_offpolicyness (eta) 0 is the synchronous run: one thread drives the engine and trains, in
// turns, and nothing is in flight while weights are published. What step n draws is a function of (seed, n,
// weights), not of what the process did before; a stop before training begins abandons the step, which will
// be drawn again, the same. Above 0 the engine generates on a thread of its own while the trainer trains; a
// stop leaves the buffer as it is, and what is in flight is begun again by the run that goes on.
//
// Once training has begun a step is finished. State that outlives the process: save()/restore(), beside
// weights and optimizer: the buffer, and which problems were begun and not trained on.
#pragma once

#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "base/clock.h"
#include "control/rollout_worker.h"
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
  WeightChannel& weights;  // from the trainer to the engine
  const Clock& clock;
  int64_t total_steps = 0;                      // nothing is drawn that later steps would use; 0: no end
  std::function<void()> on_engine_thread = {};  // where the engine has one: before anything else
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

  // Runs `work`, which may use the engine: it holds the weights of the last step and nothing of the run's is
  // in flight in it. Without a thread of the engine's, call it between steps.
  void while_suspended(const std::function<void()>& work);

  int64_t num_steps() const { return num_steps_; }  // done, since the run began

  Json save() const;
  // UserError where the state is of other problems or another seed (ProblemOrder::restore).
  void restore(const Json& state);

 private:
  bool is_asynchronous() const { return parts_.settings.rollout.max_head_offpolicyness > 0; }
  std::optional<GroupTask> next_task();
  void begin_step();
  void abandon_step();
  void publish();
  void tell_rollout(const std::vector<Trajectory>& batch, MetricValues& metrics) const;
  void tell_rewards(const std::vector<FinishedGroup>& groups, MetricValues& metrics) const;
  std::vector<Trajectory> make_batch(std::vector<FinishedGroup> groups, MetricValues& metrics) const;

  ControllerParts parts_;
  ProblemOrder order_;
  StalenessGate gate_;
  ReplayBuffer buffer_;
  int64_t num_steps_ = 0;
  int64_t published_step_ = -1;

  // Positions in the order of problems, which are the groups' ids.
  mutable std::mutex positions_mutex_;  // of what follows, and of order_: the engine's thread draws tasks
  int64_t next_position_ = 0;
  std::deque<int64_t> again_;  // begun by a step or a process that came to nothing; before any other
  std::set<int64_t> begun_;    // not trained on yet: in flight, awaiting a reward, or in the buffer

  RolloutWorker worker_;  // last: its threads use the others
};

}  // namespace bough

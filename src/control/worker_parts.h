// The interfaces that the workers of a run (workers.h) call. src/run implements them with models, files and
// ranks. Tests implement them with fakes (fakes.h). No torch.
//
//   RunWorkers ─┬─ engine's thread ──▶ Engine, WeightChannel::take, Evaluator
//               ├─ reward threads ───▶ RewardFunction, GroupFilter
//               ├─ trainer's thread ─▶ StepTrainer, CheckpointWriter::take_snapshot, WeightChannel::publish
//               └─ writer's thread ──▶ CheckpointWriter::write
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "control/controller.h"
#include "control/external_rollouts.h"

namespace bough {

// The run's problems as groups to generate. Called from several threads.
class TaskList {
 public:
  virtual ~TaskList() = default;
  // Returns the group at a position in the order of problems.
  virtual GroupTask task(uint64_t id) = 0;
};

class StepTrainer {
 public:
  virtual ~StepTrainer() = default;
  // Trains without publishing. Returns metrics and the batch as it was trained.
  virtual StepRecord train(const TrainOrder& order) = 0;
};

class CheckpointWriter {
 public:
  virtual ~CheckpointWriter() = default;
  // Copies weights and optimizer state for the next write().
  virtual void take_snapshot() = 0;
  // copied: writes the snapshot. Otherwise writes the model itself. Throws IoError, for example if the disk
  // is full.
  virtual void write(const ControllerState& state, bool copied) = 0;
  // Returns why the model itself cannot be written as it was at the end of `step`. Empty if it can. For a run
  // that an exception ended.
  virtual std::string why_not_at(int64_t /*step*/) const { return ""; }
};

class Evaluator {
 public:
  virtual ~Evaluator() = default;
  // The engine is idle before and after the call. Returns nullopt if `stop` returned true.
  virtual std::optional<MetricValues> evaluate(const std::function<bool()>& stop) = 0;
};

// The engine is used on one thread only. The other parts must allow calls from several threads.
struct WorkerParts {
  Engine& engine;
  WeightChannel& weights;
  const TextCodec& codec;
  RewardFunction& reward;
  GroupFilter* filter = nullptr;  // asked when the rewards are there; nullptr: no filter
  const Clock& clock;
  TaskList& tasks;
  StepTrainer& trainer;
  CheckpointWriter& checkpoints;
  Evaluator* evaluator = nullptr;  // nullptr: nothing is evaluated
  // Both are set if samples are conversations, else both are nullptr.
  Environment* environment = nullptr;
  const ConversationFormat* conversations = nullptr;
  // Makes the groups and runs the engine's passes. nullptr: the run does.
  ExternalRollouts* external = nullptr;
};

}  // namespace bough

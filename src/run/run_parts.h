// All parts of a run, built from its settings in the order in which they depend on each other: a wrong
// setting or a damaged file ends the run here, before anything is computed. run.cpp is the schedule over
// them.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "base/clock.h"
#include "control/prompt_encoder.h"
#include "engine/engine.h"
#include "env/group_filter.h"
#include "env/reward.h"
#include "models/model.h"
#include "rollout/copied_weights.h"
#include "run/run_folder.h"
#include "run/run_settings.h"
#include "train/trainer.h"

namespace bough {

// Threads that compute. Where the engine generates beside training they share the run's threads: two teams
// of all cores would wait for each other at every barrier.
struct ThreadSplit {
  int training = 1, generating = 1;
};
ThreadSplit split_threads(const RunSettings& settings, int threads);

// With rollout.ranks the last ones only generate.
bool only_generates(const RunSettings& settings, const Communicator& ranks);
// What such a rank's engine process (engine_process.h) is told, and what it makes of it: the model, whose
// weights rank 0 publishes, and its engine.
Json engine_job(const RunSettings& settings);
RunSettings settings_of_job(const Json& job);
struct EngineParts {
  explicit EngineParts(const RunSettings& settings);  // UserError, IoError

  const RunSettings settings;
  const PromptEncoder encoder;
  const std::unique_ptr<Model> model;
  const std::unique_ptr<Engine> engine;
};
// What of the model that generates changes between two publications.
Changing what_changes(const RunSettings& settings);
// Whether the engine's tensors must keep their addresses when it takes weights: a quantized copy or a CUDA
// graph reads them there.
bool takes_weights_in_place(const RunSettings& settings, const Model& model);

struct RunParts {
  // UserError, IoError; Interrupted where `stop` says so while the device is measured. Locks the run's
  // folder.
  // `ranks`: processes that train together, each with parts of its own; null: this one alone. Those that only
  // rank 0 of them has are null in the others: rewards, environment, filter, folder.
  RunParts(const RunSettings& settings, const std::function<bool()>& stop, Communicator* ranks = nullptr);
  RunParts(const RunParts&) = delete;
  RunParts& operator=(const RunParts&) = delete;

  const RunSettings settings;
  const ThreadSplit threads;
  SteadyClock clock;
  Dataset problems;
  Dataset valid;  // empty: no evaluation
  PromptEncoder encoder;
  std::unique_ptr<RewardFunction> reward;
  std::unique_ptr<Environment> environment;  // null: prompts of one turn
  std::unique_ptr<GroupFilter> filter;       // null: there is none
  const TrainingRanks training;              // those that train together
  std::unique_ptr<Model> model;              // trained, and shared with the engine
  std::unique_ptr<Model> whole;      // rank 0's where ranks share its layers: what is published; else null
  std::unique_ptr<Model> reference;  // of the KL terms; null where there is none
  std::unique_ptr<Model> teacher;    // null where there is none
  const int64_t total_steps;
  std::unique_ptr<Model> critic_model;     // its own backbone; null where it shares the actor's, or is none
  std::unique_ptr<Critic> critic;          // of adv_estimator gae
  const SparsePolicy sparse;               // what the engine attends by
  std::unique_ptr<SparseStudent> student;  // what the engine generates with, where it is not `model`
  std::unique_ptr<const PassCosts> weak_costs;  // of the student's plans, where it is a model of its own
  std::unique_ptr<Model> generating;  // the engine's own copy, where it generates beside training; else null
  Trainer trainer;
  // What is published: the student, where one generates, else the trained model, or where ranks share its
  // layers what Trainer::whole_model() sets.
  const Model& published() const { return student ? student->model() : whole ? *whole : *model; }
  std::unique_ptr<WeightChannel> weights;
  std::unique_ptr<Engine> engine;                   // null: servers, for rank 0, or engine ranks generate
  std::optional<ConversationFormat> conversations;  // where there is an environment
  std::unique_ptr<RunFolder> folder;
};

}  // namespace bough

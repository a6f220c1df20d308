// The components of a run, built from its settings in order of their dependencies. A wrong setting or a
// damaged file throws here, before anything is computed. run.cpp connects and drives the components.
#pragma once

#include <c10/core/ScalarType.h>

#include <functional>
#include <memory>
#include <optional>

#include "base/clock.h"
#include "control/prompt_encoder.h"
#include "engine/engine.h"
#include "env/group_filter.h"
#include "env/reward.h"
#include "kernels/common/device.h"
#include "models/model.h"
#include "rollout/copied_weights.h"
#include "run/memory_plan.h"
#include "run/run_folder.h"
#include "run/run_settings.h"
#include "train/trainer.h"

namespace bough {

// Numbers of compute threads. If the engine generates in parallel with training, the two share the run's
// threads: two teams of all cores would wait for each other at every barrier.
struct ThreadSplit {
  int training = 1, generating = 1;
};
ThreadSplit split_threads(const RunSettings& settings, int threads);

// Whether this rank only generates: the last rollout.ranks ranks do.
bool only_generates(const RunSettings& settings, const Communicator& ranks);
// The job (JSON) for the engine process of a rank that only generates (engine_process.h), and what that
// process builds from the job: the model, whose weights rank 0 publishes, and its engine.
Json engine_job(const RunSettings& settings);
RunSettings settings_of_job(const Json& job);
struct EngineParts {
  explicit EngineParts(const RunSettings& settings);  // UserError, IoError

  const RunSettings settings;
  const PromptEncoder encoder;
  const std::unique_ptr<Model> model;
  const std::unique_ptr<Engine> engine;
};
// Returns which parameters of the generating model change between two publications.
Changing what_changes(const RunSettings& settings);
// Whether the engine's tensors must keep their addresses when it takes weights, because a quantized copy or a
// CUDA graph reads them there.
bool takes_weights_in_place(const RunSettings& settings, const Model& model);

struct RunComponents {
  // `ranks`: processes that train together, each with its own RunComponents; nullptr: one process. Only rank
  // 0 has rewards, environment, filter and folder, and locks the folder. They are nullptr on the other ranks.
  // Throws UserError or IoError. Throws Interrupted if `stop` returns true while the device is measured.
  RunComponents(const RunSettings& settings, const std::function<bool()>& stop,
                Communicator* ranks = nullptr);
  RunComponents(const RunComponents&) = delete;
  RunComponents& operator=(const RunComponents&) = delete;

  const ThreadSplit threads;
  SteadyClock clock;
  PromptEncoder encoder;
  Dataset problems;  // whose prompts fit the model's context, as those of `valid`
  Dataset valid;     // empty: no evaluation
  std::unique_ptr<RewardFunction> reward;
  std::unique_ptr<Environment> environment;        // nullptr: prompts of one turn
  std::unique_ptr<GroupFilter> filter;             // nullptr: there is none
  const std::optional<DeviceProfile> gpu_profile;  // measured before weights fill the GPU; nullopt: a CPU
  const std::optional<MemoryPlan> memory;          // of a GPU
  const RunSettings settings;                      // as given, with the memory plan's decisions
  const TrainingRanks training;                    // the ranks that train together
  std::unique_ptr<Model> model;                    // trained; shared with the engine in synchronous runs
  std::unique_ptr<Model> unsharded;  // on rank 0, if layers are sharded: for publishing; else nullptr
  std::unique_ptr<Model> reference;  // for the KL terms; nullptr if there is none
  std::unique_ptr<Model> teacher;    // nullptr if there is none
  const int64_t total_steps;
  std::unique_ptr<Model> critic_model;  // the critic's backbone; nullptr: it is the actor's, or no critic
  std::unique_ptr<Critic> critic;       // for adv_estimator gae; else nullptr
  const SparsePolicy sparse;            // of the engine's attention
  std::unique_ptr<SparsePolicyTrainer> sparse_trainer;  // if set, its model is the one that generates
  std::unique_ptr<const PassCosts> draft_costs;         // for plans of a separate draft policy
  std::unique_ptr<Model> generating;  // the engine's copy; nullptr: eta is 0, or `engine` is nullptr
  const DeviceClock device_clock;     // the trainer's
  Trainer trainer;
  // The model whose weights are published: that of sparse_trainer if there is one. Else, if layers are
  // sharded, the unsharded model that Trainer::unsharded_model() fills. Else the trained model.
  const Model& published() const {
    return sparse_trainer ? sparse_trainer->model() : unsharded ? *unsharded : *model;
  }
  std::unique_ptr<WeightChannel> weights;
  // With servers, rank 0 has a ServerEngine and the other ranks nullptr. With engine ranks: nullptr.
  std::unique_ptr<Engine> engine;
  std::optional<ConversationFormat> conversations;  // set if there is an environment
  std::unique_ptr<RunFolder> folder;
};

}  // namespace bough

// AdamW (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization") over a model's parameters.
//
// State per parameter element, in the accumulator type (fp32 for bf16 and fp32 models, fp64 for fp64 ones):
// both moments, and for bf16 models the master weight that the model's bf16 value is rounded from. An fp32 or
// fp64 value is its own master. The state takes 12 bytes per element (bf16), 8 (fp32) or 16 (fp64).
//
// With several ranks (collective_buckets.h) each rank owns a shard of every parameter's elements and holds
// the state of that shard only (ZeRO stage 1, Rajbhandari et al. 2020). step() reduce-scatters the gradient,
// updates the local shard and all-gathers the weights. So each rank's main_grad may hold only its part of the
// gradient.
//
// With `offload` the state is in host memory and the update is computed there (Ren et al. 2021,
// "ZeRO-Offload"), while the next gradients arrive and updated weights leave (offloaded_update.h).
//
// Norm weights and biases (parameters of one dimension) are not decayed.
//
// An optimizer step whose global gradient norm is not finite is skipped: weights, moments and the step count
// of the bias correction do not change, and the gradient is dropped. num_skipped() counts these steps. The
// learning rate schedule still advances (as in AReaL), because it is defined by the planned number of steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "models/model.h"
#include "models/safetensors.h"
#include "train/settings.h"

namespace bough {

// The learning rate of each optimizer step: linear warm-up, then constant, linear or cosine decay.
//
// With w = num_warmup_steps and n = num_steps, step s = 0, 1, ... has the learning rate peak times
//   (s + 1) / w                                            for s < w: nonzero at the first step
//   1                                                      constant
//   min_ratio + (1 - min_ratio) · (1 - p)                  linear,  p = (s - w) / (n - w), at most 1
//   min_ratio + (1 - min_ratio) · (1 + cos(pi · p)) / 2    cosine
// Step w has the peak rate, and every step from n on has min_ratio times the peak with linear or cosine.
struct Schedule {
  enum class Shape { kConstant, kLinear, kCosine };

  double peak = 0;
  Shape shape = Shape::kConstant;
  double min_ratio = 0;
  int64_t num_warmup_steps = 0;
  int64_t num_steps = 0;

  double learning_rate(int64_t step) const;
};

// Throws UserError if `name` is not constant, linear or cosine.
Schedule::Shape schedule_shape(const std::string& name);

// The schedule of a run of `total_steps` optimizer steps. Warm-up is rounded to whole steps.
Schedule make_schedule(const OptimizerSettings& settings, int64_t total_steps);

// An optimizer's state to be saved: views of its tensors, or copies in host memory, which training leaves.
struct OptimizerSnapshot {
  NamedTensors tensors;
  int64_t num_steps = 0, num_skipped = 0;

  // Writes <directory>/optimizer.safetensors. Tensors have the part's Hugging Face name with the suffix
  // .exp_avg, .exp_avg_sq or, for bf16 models, .master. The counts are in the metadata.
  void save(const std::filesystem::path& directory) const;
};

// The process groups that take optimizer steps together. Each is nullptr if this rank has no such group. Not
// owned.
struct OptimizerRanks {
  Communicator* data = nullptr;    // the ranks with the same parameters
  Communicator* tensor = nullptr;  // tensor parallelism (models/tensor_parallel.h)
  Communicator* stages = nullptr;  // the pipeline stages (models/pipeline_stage.h)
  // The embedding if it is tied to lm_head and both the first and the last stage hold it, else nullptr.
  const Parameter* tied = nullptr;
  // Makes results independent of the size of `data`, bit for bit (collective_buckets.h).
  bool fixed_shards = false;
};

class OffloadedUpdate;

class Optimizer {
 public:
  // Allocates the state, and main_grads that are missing. The model must outlive the optimizer. Masters are
  // copied from the model's weights, so load the weights first.
  // total_steps: optimizer steps of the whole run, >= 0.
  // ranks: the ranks with the same parameters, which call step() together; nullptr if there is one. Not
  // owned.
  // fixed_shards: OptimizerRanks.
  Optimizer(Model& model, const OptimizerSettings& settings, int64_t total_steps,
            Communicator* ranks = nullptr, bool fixed_shards = false);
  // The same for a list of parameters, which must outlive the optimizer.
  Optimizer(const std::vector<Parameter*>& parameters, const OptimizerSettings& settings, int64_t total_steps,
            const OptimizerRanks& ranks);

  struct Report {
    double grad_norm;  // global, before clipping; infinite or NaN if the step was skipped
    double lr;         // the schedule's value for this step, skipped or not
    bool skipped;
  };

  // Updates the weights from main_grad, summed over the ranks, and sets main_grad to zero. The squares of the
  // gradient norm are summed in fp64 in a fixed order. Collective call.
  Report step();

  // The next steps use these settings: betas, eps, weight decay, clipping, and lr as a constant rate.
  void use(const OptimizerSettings& settings);

  int64_t num_steps() const { return num_steps_; }  // calls of step(), including skipped steps
  int64_t num_skipped() const { return num_skipped_; }
  const OptimizerSettings& settings() const { return settings_; }

  // Collective call. Rank 0 returns the full state, other ranks an empty one. The state does not depend on
  // the number of ranks, and any number of ranks can load it. Training continues bit for bit after load(),
  // if fp32 and fp64 models also restore their weights.
  OptimizerSnapshot snapshot(bool copies) const;
  void save(const std::filesystem::path& directory) const { snapshot(false).save(directory); }
  // For bf16 models this also sets the model's weights, from the masters. Throws UserError if the file is
  // damaged or from another model; optimizer and model are then unchanged.
  void load(const std::filesystem::path& directory);

  // The tensors of the local state, for moving them to another place and back: until they are back, no other
  // function may be called.
  std::vector<at::Tensor*> state_tensors();

  // Throws InternalError if sizes, dtypes or counts are wrong, or weights differ from the rounded masters.
  // O(elements).
  void check_integrity() const;

 private:
  struct State {
    Parameter* parameter;
    bool decayed;
    int64_t begin, count;  // local elements of the parameter, in memory order
    // [count] each.
    at::Tensor master;  // undefined if the value is its own master
    at::Tensor exp_avg, exp_avg_sq;
    at::Tensor own(const at::Tensor& whole) const { return whole.view(-1).narrow(0, begin, count); }
    bool is_offloaded() const { return exp_avg.device() != parameter->value.device(); }
    // x on the state's device, which is the CPU if the state is offloaded.
    at::Tensor here(const at::Tensor& x) const { return x.to(exp_avg.device()); }
  };
  // One saved tensor: a part of a parameter's state.
  struct Saved {
    std::string name;
    const State* state;
    at::Tensor State::*tensor;
    const Parameter::Part* part;
  };
  std::vector<Saved> saved() const;
  at::Tensor square_of(const State& state, const at::Tensor& gradient, int64_t begin, int64_t count) const;
  double norm_of(const std::vector<at::Tensor>& gradients) const;

  OptimizerSettings settings_;
  Schedule schedule_;
  Communicator* ranks_;         // nullptr if this process trains alone
  Communicator* tensor_ranks_;  // nullptr if tensor parallelism is off
  Communicator* stages_;        // nullptr if pipeline parallelism is off
  const Parameter* tied_;       // or nullptr
  bool fixed_;                  // shards are cut by kFixedShares
  std::vector<State> states_;
  std::shared_ptr<OffloadedUpdate> offloaded_;  // nullptr if the state is on the device of the weights
  int64_t num_steps_ = 0;
  int64_t num_skipped_ = 0;
};

}  // namespace bough

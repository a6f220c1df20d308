// AdamW (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization") over a model's parameters.
//
// State per parameter element, in the accumulator type (fp32 for bf16 and fp32 models, fp64 for fp64 ones):
// both moments, and for bf16 models the master weight that the model's bf16 value is rounded from. An fp32 or
// fp64 value is its own master. So it takes 12 (bf16), 8 or 16 bytes an element beside weights and main_grad.
//
// Of several ranks (ranks.h) each has a share of every parameter's elements and the state of those alone
// (ZeRO stage 1, Rajbhandari et al. 2020): a step sums each share's gradient over the ranks, where its rank
// updates it, and gathers the weights again. So main_grad may hold a rank's own part of the gradient.
//
// With `offload` the state lies in the host's memory and the update is computed there (Ren et al. 2021,
// "ZeRO-Offload"): the gradient is brought over and the weights are taken back, one parameter after the
// other.
//
// Norm weights and biases (parameters of one dimension) are not decayed.
//
// A step whose global gradient norm is not finite is skipped: weights, moments and the count of the bias
// correction stay, the gradient is dropped, num_skipped() counts it. The schedule advances all the same (as
// in AReaL): it follows the run's steps, whose number is planned, and ends with the run.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "models/model.h"
#include "models/safetensors.h"
#include "train/settings.h"

namespace bough {

// The learning rate of each optimizer step: linear warm-up, then constant, linear or cosine decay.
//
// With w = num_warmup_steps and n = num_steps, step s = 0, 1, ... runs at peak times
//   (s + 1) / w                                            for s < w: the first step moves already
//   1                                                      constant
//   min_ratio + (1 - min_ratio) · (1 - p)                  linear,  p = (s - w) / (n - w), at most 1
//   min_ratio + (1 - min_ratio) · (1 + cos(pi · p)) / 2    cosine
// so that step w is at the peak and every step from n on at min_ratio. Pure: a resumed run computes the same.
struct Schedule {
  enum class Shape { kConstant, kLinear, kCosine };

  double peak = 0;
  Shape shape = Shape::kConstant;
  double min_ratio = 0;
  int64_t num_warmup_steps = 0;
  int64_t num_steps = 0;

  double learning_rate(int64_t step) const;
};

// UserError: a name that is none of constant, linear, cosine.
Schedule::Shape schedule_shape(const std::string& name);

// The schedule of a run of `total_steps` optimizer steps; warm-up is rounded to whole steps.
Schedule make_schedule(const OptimizerSettings& settings, int64_t total_steps);

// An optimizer's state as it is saved: views of the optimizer's own, or a copy that training does not change.
struct OptimizerSnapshot {
  NamedTensors tensors;
  int64_t num_steps = 0, num_skipped = 0;

  // <directory>/optimizer.safetensors: under each part's Hugging Face name with the suffix .exp_avg,
  // .exp_avg_sq and, for bf16 models, .master; the counts are in its metadata.
  void save(const std::filesystem::path& directory) const;
};

class Optimizer {
 public:
  // Allocates its state, and the model's main_grads where there are none. The model must outlive it. Masters
  // start as the model's values: load weights first. total_steps >= 0: optimizer steps of the whole run.
  // `ranks`: those that step together, of the same weights; null: this process alone. Not owned.
  // `fixed_shares`: the bits do not depend on the number of ranks (ranks.h).
  Optimizer(Model& model, const OptimizerSettings& settings, int64_t total_steps,
            Communicator* ranks = nullptr, bool fixed_shares = false);
  // Over these alone, which must outlive it. `tensor_ranks`: those that have the other pieces of them
  // (models/tensor_parallel.h), or null; of a model its own. `stages`: those that have the other layers
  // (models/pipeline.h); `tied`: of these parameters the one that both end stages have.
  Optimizer(const std::vector<Parameter*>& parameters, const OptimizerSettings& settings, int64_t total_steps,
            Communicator* ranks = nullptr, bool fixed_shares = false, Communicator* tensor_ranks = nullptr,
            Communicator* stages = nullptr, const Parameter* tied = nullptr);

  struct Report {
    double grad_norm;  // global, before clipping; may be infinite or NaN where skipped
    double lr;         // the schedule's value for this step, skipped or not
    bool skipped;
  };

  // Updates the weights from main_grad, summed over the ranks, which is zero afterwards. The norm is summed
  // in fp64 in a fixed order.
  Report step();

  int64_t num_steps() const { return num_steps_; }  // calls of step(), skipped ones too
  int64_t num_skipped() const { return num_skipped_; }
  const OptimizerSettings& settings() const { return settings_; }

  // Of several ranks a call of all, of which the first gets the whole and the others nothing: what is saved
  // does not depend on their number, and any number loads it. Restoring it, and the model's weights where
  // they are their own masters, goes on bit for bit.
  OptimizerSnapshot snapshot(bool copies) const;
  void save(const std::filesystem::path& directory) const { snapshot(false).save(directory); }
  // UserError names what is damaged or of another model; optimizer and model are then unchanged. For bf16
  // models it also sets the model's values, from the masters.
  void load(const std::filesystem::path& directory);

  // Sizes, dtypes, counts, and that values are their masters rounded. O(elements).
  void check_integrity() const;

 private:
  struct State {
    Parameter* parameter;
    bool decayed;
    int64_t begin, count;  // own elements of the parameter, in memory order
    // One dimension, of these.
    at::Tensor master;  // undefined where the value is its own master
    at::Tensor exp_avg, exp_avg_sq;
    at::Tensor own(const at::Tensor& whole) const { return whole.view(-1).narrow(0, begin, count); }
    // Where the state is: elsewhere than the parameter where that is on a device and the state offloaded.
    at::Tensor here(const at::Tensor& x) const { return x.to(exp_avg.device()); }
  };
  // What is saved of a part of a parameter.
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
  Communicator* ranks_;         // null: this process alone
  Communicator* tensor_ranks_;  // null: the parameters are whole
  Communicator* stages_;        // null: they are of all layers
  const Parameter* tied_;       // or null
  bool fixed_;                  // kFixedShares
  std::vector<State> states_;
  int64_t num_steps_ = 0;
  int64_t num_skipped_ = 0;
};

}  // namespace bough

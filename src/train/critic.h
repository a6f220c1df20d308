// A critic: a backbone and a linear value head. V_t = w · h(parent(t)) + b is the value before token t is
// sampled; h is the final hidden state. There is one value per loss row, as for the policy's
// log-probabilities. So values and their gradients use the same plans and compute each tree token once.
//
// The backbone is a separate model or the actor's. If it is the actor's, one plan execution adds the
// gradients of the value loss and of the policy loss. The actor's optimizer then updates the backbone, and
// the critic's optimizer updates only the head.
//
// If the backbone is a mixture of experts, a separate one chooses its own experts. The actor's replays
// recorded experts, as in the policy's passes.
//
// The head has the accumulator type and starts at zero: before the first update every value is 0, and an
// advantage equals a return. In a pipeline (models/pipeline_stage.h) the last stage has the head.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "algo/value_loss.h"
#include "train/executor.h"
#include "train/head.h"
#include "train/optimizer.h"
#include "train/parallel_groups.h"
#include "train/pass_memory.h"

namespace bough {

// The linear layer, named as in transformers' *ForTokenClassification: score.weight, score.bias.
struct ValueHead {
  // copies: number of tensor-parallel ranks. Each rank holds a copy of the whole head.
  ValueHead(int64_t hidden_size, at::ScalarType type, at::Device device, int64_t copies = 1);

  Parameter weight;  // [1, D]
  Parameter bias;    // [1]
  std::vector<Parameter*> parameters() { return {&weight, &bias}; }
};

struct ValueExecution {
  at::Tensor values_R;  // CPU, accumulator type: one per loss row of the batch
  double loss = 0;
  WeightedSums metrics;
};

// The value head during plan execution: computes the value of each head row (head.h) and, with a loss, the
// gradients. Accumulates (+=) into the head's main_grad.
class ValueBlockHead final : public BlockHead {
 public:
  struct Options {
    bool has_loss = false;         // true: the batch must have old values and returns; false: only values
    bool reaches_backbone = true;  // whether run() returns the gradient of the hidden states
    double loss_coef = 1;
    std::optional<double> eps_clip;
  };
  // `head` must outlive this object.
  ValueBlockHead(ValueHead& head, const TrainBatch& batch, const Options& options);

  at::Tensor run(const BlockRows& rows, const RowIndices& indices, const at::Tensor& source_SD) override;
  // Call after the last plan block. Waits for the GPU; run() does not.
  ValueExecution finish();

 private:
  at::Tensor gradient(const RowIndices& indices, const at::Tensor& values);

  ValueHead& head_;
  const Options options_;
  // All loss rows of the batch, on the head's device. Each plan block fills in the values_R of its rows.
  ValueRows rows_;
  LossSums sums_;
};

// The data that a checkpoint is written from. If the snapshot is a copy, training may continue meanwhile.
// With several ranks, only rank 0's snapshot is complete.
struct CriticSnapshot {
  std::shared_ptr<Model> backbone;  // nullptr if the critic shares the actor's backbone
  NamedTensors head;
  OptimizerSnapshot optimizer;

  // Writes value_head.safetensors and optimizer.safetensors. If the critic has its own backbone, also writes
  // <directory>/model, a Hugging Face directory.
  void save(const std::filesystem::path& directory) const;
};

class Critic {
 public:
  // backbone: must outlive this object. The actor's model if settings.share_backbone.
  // actor: settings of plans and passes.
  // total_updates: optimizer steps of the whole run.
  // ranks: nullptr if this process trains alone. Not owned. Each rank makes a Critic with its shard of the
  // backbone. The constructor and all functions that compute, snapshot or load are then collective.
  Critic(Model& backbone, const CriticSettings& settings, const ActorSettings& actor, int64_t total_updates,
         const TrainingRanks* ranks = nullptr);

  const CriticSettings& settings() const { return settings_; }
  bool shares_backbone() const { return settings_.share_backbone.value_or(false); }

  // Sets the costs for plans of the critic's own backbone. Without costs, the plan strategy `auto` means
  // `blocks` with passes of at most max_tokens_per_mb tokens.
  void use_costs(const PassCosts* costs) { costs_ = costs; }
  // Sets the memory for passes, in place of that of the backbone's device.
  void use_memory(PassMemory memory) { pass_memory_ = std::move(memory); }
  Plan plan(const TrainBatch& batch) const;  // with several replicas: for this replica's shard of the batch

  // Values of all loss rows, forward only. [R]
  at::Tensor values(const TrainBatch& batch);

  // Executes the plan and computes the value loss from the batch's old values and returns. Adds gradients to
  // main_grad of the head and, if the critic has its own backbone, of the backbone. A backbone that is the
  // actor's gets no gradient here.
  ValueExecution add_gradient(const Plan& plan, const TrainBatch& batch);
  // The value head to pass to the policy's plan execution if critic and actor have one backbone. Throws
  // InternalError if the critic has its own backbone.
  ValueBlockHead beside_policy(const TrainBatch& batch);
  // Calls head.finish() after the plan execution. Returns values, loss and metrics of all loss rows, summed
  // over the ranks.
  ValueExecution result_of(ValueBlockHead& head);

  Optimizer& optimizer() { return optimizer_; }
  ValueHead& head() { return head_; }  // unused on pipeline stages other than the last
  Model& backbone() { return backbone_; }

  // Bytes that the critic always holds: weights, gradients and optimizer state. With several ranks, the
  // maximum over ranks, because all ranks must plan with the same memory.
  int64_t resident_bytes() const { return resident_bytes_; }

  CriticSnapshot snapshot(bool copies) const;
  // Restores what a snapshot saved, bit for bit. Throws UserError if a file is missing, damaged or from
  // another critic. After an error the critic may be partly restored.
  void load(const std::filesystem::path& directory);
  // Loads only the head, if `directory` contains one that a snapshot saved; otherwise does nothing.
  void load_head_if_saved(const std::filesystem::path& directory);

 private:
  std::vector<Parameter*> trained_parameters();  // those of the critic's own optimizer
  int64_t largest_resident_bytes();
  void load_head(const std::filesystem::path& directory);
  ValueBlockHead::Options with_loss(bool reaches_backbone) const;

  Model& backbone_;
  const CriticSettings settings_;
  ActorSettings actor_;               // mb_spec.memory is reduced by the memory that the critic holds
  const TrainingRanks* const ranks_;  // nullptr if this process trains alone
  const PassCosts* costs_ = nullptr;
  ValueHead head_;
  Executor executor_;
  Optimizer optimizer_;
  PassMemory pass_memory_;
  int64_t resident_bytes_;
};

// Loads the backbone that settings.path names: a Hugging Face directory, whose lm_head is ignored, or a
// critic that a run saved. If the path is empty, loads a copy of `actor_path`. Throws UserError if the
// vocabulary size differs from the actor's.
std::unique_ptr<Model> load_critic_backbone(const CriticSettings& settings, const std::string& actor_path,
                                            const Model& actor);

// Returns `settings` with mb_spec.memory reduced by the critic's resident bytes; unchanged if `critic` is
// nullptr or the memory is auto. Throws UserError if no memory is left.
ActorSettings beside_critic(const ActorSettings& settings, const Critic* critic);

// Whether a separate backbone of the actor's shape fits into memory in addition to the actor.
// - If mb_spec.memory is given: the backbone's weights, gradients and optimizer state must take at most half
//   of it. The other half is for passes.
// - If it is auto: these, and the actor's gradients and optimizer state (not allocated yet), must take at
//   most kCriticShare of the device's `free` bytes.
inline constexpr double kCriticShare = 0.7;
bool memory_holds_critic(const ActorSettings& settings, Model& actor, int64_t free);

}  // namespace bough

// A critic: a backbone and a linear value head, V_t = w · h(parent(t)) + b with h the final hidden state, the
// value before token t is drawn. Its rows are those of the policy's log-probabilities, one a trained token,
// so that values and their gradient come from the same walks over the same tree, each shared token once.
//
// The backbone is a model of its own, or the actor's: then the value loss' gradient adds to the policy's in
// one walk, the actor's optimizer moves the backbone, and the critic's own optimizer the head alone.
//
// The head is of the accumulator type, whatever the backbone's is, and starts at zero: before the first
// update every value is 0, and an advantage is a return. Of a pipeline (models/pipeline.h) it is the last
// stage's.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "algo/value_loss.h"
#include "train/executor.h"
#include "train/head.h"
#include "train/optimizer.h"
#include "train/ranks.h"

namespace bough {

// The linear layer, named as transformers' *ForTokenClassification name theirs: score.weight, score.bias.
struct ValueHead {
  // `copies`: ranks that share the backbone's layers, each of which has the whole head.
  ValueHead(int64_t hidden_size, at::ScalarType type, at::Device device, int64_t copies = 1);

  Parameter weight;  // [1, D]
  Parameter bias;    // [1]
  std::vector<Parameter*> parameters() { return {&weight, &bias}; }
};

struct ValueWalk {
  at::Tensor values_R;  // CPU, accumulator type: of every row of the batch
  double loss = 0;
  WeightedSums metrics;
};

// The value head in a walk: values of every row, and with a loss its gradient. Accumulates (+=) into the
// head's main_grad.
class ValueBlockHead final : public BlockHead {
 public:
  struct Options {
    bool has_loss = false;         // else values alone; the batch has old values and returns
    bool reaches_backbone = true;  // whether the gradient goes on into the hidden states
    double loss_coef = 1;
    std::optional<double> eps_clip;
  };
  // `head` must outlive it.
  ValueBlockHead(ValueHead& head, const TrainBatch& batch, const Options& options);

  at::Tensor run(const BlockRows& rows, const RowIndices& indices, const at::Tensor& source_SD) override;
  // After the last block, before which no GPU is waited for.
  ValueWalk finish();

 private:
  at::Tensor gradient(const RowIndices& indices, const at::Tensor& values);

  ValueHead& head_;
  const Options options_;
  // Of every row of the batch, on the head's device; values_R is filled from block to block.
  ValueRows rows_;
  LossSums sums_;
};

// What a checkpoint is written from, while training goes on where it is a copy; of several ranks the first's.
struct CriticSnapshot {
  std::shared_ptr<Model> backbone;  // null: the actor's
  NamedTensors head;
  OptimizerSnapshot optimizer;

  // <directory>/model, a Hugging Face directory, where the critic has a backbone of its own;
  // value_head.safetensors; optimizer.safetensors.
  void save(const std::filesystem::path& directory) const;
};

class Critic {
 public:
  // `backbone` must outlive it; it is the actor's where settings.share_backbone. `actor`: how batches go
  // through a model. total_updates: optimizer steps of the whole run. `ranks`: those that train together,
  // each of which makes one, with its pieces of the backbone, and calls what walks or snapshots; null: this
  // process alone.
  Critic(Model& backbone, const CriticSettings& settings, const ActorSettings& actor, int64_t total_updates,
         const TrainingRanks* ranks = nullptr);

  const CriticSettings& settings() const { return settings_; }
  bool shares_backbone() const { return settings_.share_backbone.value_or(false); }

  // What plans of its own backbone are made from; without it `auto` is `blocks` with passes of B tokens.
  void use_costs(const PassCosts* costs) { costs_ = costs; }
  Plan plan(const TrainBatch& batch) const;  // of several ranks: of the own share

  // Values of all rows, forward only. [R]
  at::Tensor values(const TrainBatch& batch);

  // The value loss over old values and returns of the batch. Own backbone: a walk over `plan` with gradients;
  // the actor's: a walk that leaves the backbone alone and computes the head's gradient.
  ValueWalk accumulate(const Plan& plan, const TrainBatch& batch);
  // The value head for the policy's own walk over a shared backbone.
  ValueBlockHead beside_policy(const TrainBatch& batch);
  // What that head found, of all ranks' rows.
  ValueWalk result_of(ValueBlockHead& head);

  Optimizer& optimizer() { return optimizer_; }
  ValueHead& head() { return head_; }  // of other stages than the last nothing reads it
  Model& backbone() { return backbone_; }

  // Bytes beside the actor's that it always holds: weights, gradients, the optimizer's state. Of several
  // ranks those of the one that holds most, since all plan alike.
  int64_t resident_bytes() const { return resident_bytes_; }

  CriticSnapshot snapshot(bool copies) const;
  // Goes on from what a snapshot saved, bit for bit. UserError names what is missing, damaged or of another
  // critic; the critic may then be restored in part.
  void load(const std::filesystem::path& directory);
  // The head alone, where the directory is one that a snapshot saved.
  void load_head_if_saved(const std::filesystem::path& directory);

 private:
  std::vector<Parameter*> trained_parameters();  // by its own optimizer
  int64_t largest_resident_bytes();
  void load_head(const std::filesystem::path& directory);
  ValueBlockHead::Options with_loss(bool reaches_backbone) const;

  Model& backbone_;
  const CriticSettings settings_;
  ActorSettings actor_;               // less the memory that the critic holds
  const TrainingRanks* const ranks_;  // null: this process alone
  const PassCosts* costs_ = nullptr;
  ValueHead head_;
  Executor executor_;
  Optimizer optimizer_;
  int64_t resident_bytes_;
};

// The backbone that settings.path names: a Hugging Face directory, whose head of logits is left out, or a
// critic that a run saved. Empty: a copy of `actor_path`. UserError: another vocabulary than the actor's.
std::unique_ptr<Model> load_critic_backbone(const CriticSettings& settings, const std::string& actor_path,
                                            const Model& actor);

// Settings of a model that trains beside a critic: mb_spec.memory less what the critic holds. UserError:
// nothing is left.
ActorSettings beside_critic(const ActorSettings& settings, const Critic* critic);

// Whether memory holds a critic's own backbone of the actor's shape beside the actor: its weights, gradients
// and optimizer are at most half of mb_spec.memory, so that as much is left for passes; where that is auto,
// they and the actor's gradients and optimizer, which are still to be allocated, are at most kCriticShare of
// `free` bytes of the device.
inline constexpr double kCriticShare = 0.7;
bool memory_holds_critic(const ActorSettings& settings, Model& actor, int64_t free);

}  // namespace bough

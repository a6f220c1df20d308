// Settings of training: `actor` in a run's settings (docs/formats.md), with AReaL's names.
#pragma once

#include <optional>
#include <string>

#include "algo/advantages.h"
#include "algo/filters.h"
#include "algo/loss_settings.h"
#include "algo/reward_shaping.h"
#include "base/error.h"
#include "base/settings.h"
#include "models/lora_settings.h"
#include "plan/packing.h"
#include "plan/plan.h"

namespace bough {

// AdamW (optimizer.h).
struct OptimizerSettings {
  double lr = 1e-5;
  double weight_decay = 0.01;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double gradient_clipping = 1.0;
  std::string lr_scheduler_type = "constant";
  double min_lr_ratio = 0.0;
  double warmup_steps_proportion = 0.05;
  std::optional<bool> offload;

  template <class V>
  void visit(V& v) {
    v("lr", lr, "peak learning rate", range(0.0, 10.0));
    v("weight_decay", weight_decay, "decoupled weight decay; none on norms and biases", range(0.0, 10.0));
    v("beta1", beta1, "decay of the mean of gradients", range(0.0, 0.999999));
    v("beta2", beta2, "decay of the mean of squared gradients", range(0.0, 0.9999999));
    v("eps", eps, "added to the root of the second moment", above(0.0));
    v("gradient_clipping", gradient_clipping, "largest global gradient norm; 0: no clipping", at_least(0.0));
    v("lr_scheduler_type", lr_scheduler_type, "shape of the learning rate after warm-up",
      one_of({"constant", "linear", "cosine"}));
    v("min_lr_ratio", min_lr_ratio, "final learning rate divided by the peak", range(0.0, 1.0));
    v("warmup_steps_proportion", warmup_steps_proportion, "share of all steps in which lr rises to its peak",
      range(0.0, 1.0));
    v("offload", offload,
      "moments and master weights in host memory, with the update computed on the CPU; saves 12 bytes per "
      "parameter on a GPU, copies 6 bytes per parameter each step; null: only if a GPU's memory does not "
      "hold "
      "the run otherwise");
  }
};

// Default of max_tokens_per_mb on the CPU and on a GPU, which only larger passes use fully.
inline constexpr int64_t kMaxTokensPerPass = 4096, kMaxTokensPerPassOfGpu = 16384;

struct MicroBatchSettings {
  std::optional<int64_t> max_tokens_per_mb;
  int64_t n_mbs = 1;
  std::string allocation = "dynamic";
  Bytes memory;

  // Whether the settings fix or bound the number of micro-batches.
  bool counts() const { return n_mbs != 1 || allocation != "dynamic"; }
  // Settings that name a device call it in their complete(). Others have the CPU's default.
  void complete_for(const std::string& device) {
    if (!max_tokens_per_mb) max_tokens_per_mb = device == "cuda" ? kMaxTokensPerPassOfGpu : kMaxTokensPerPass;
  }

  template <class V>
  void visit(V& v) {
    v("max_tokens_per_mb", max_tokens_per_mb,
      "largest number of tokens in a pass (B); null: 4096, on a GPU 16384", range(1, 1'000'000'000));
    v("n_mbs", n_mbs,
      "with tree_training_mode dense: least number of micro-batches; allocation fixed: exact number",
      range(1, 1'000'000));
    v("allocation", allocation,
      "with tree_training_mode dense: how micro-batches are filled; dynamic: longest sequence first, within "
      "max_tokens_per_mb; fixed: n_mbs with equally many sequences of any length, as a baseline",
      one_of({"dynamic", "fixed"}));
    v("memory", memory,
      "memory budget of plans over weights and gradients, for example 40GiB; auto: as much as passes of "
      "max_tokens_per_mb take, on a GPU by the run's memory plan");
  }
};

// How a batch is planned. `enable_tree_training` and `pad_to_maximum` are AReaL's. `enable_tree_training`:
// true: any plan that merges common prefixes; false: `dense`. `pad_to_maximum` has no effect.
struct TreeTrainingSettings {
  std::string tree_training_mode = "auto";
  std::optional<bool> enable_tree_training;
  bool pad_to_maximum = false;
  std::string packer = "auto";
  std::optional<bool> gradient_checkpointing;
  std::optional<bool> activation_offload;

  template <class V>
  void visit(V& v) {
    const auto modes = strategy_names(), packers = packer_names();
    v("tree_training_mode", tree_training_mode,
      "how a batch is cut into passes; auto: by the plan with the shortest predicted time",
      aliased({modes.begin(), modes.end()}, {{"disabled", "dense"}, {"dta", "path"}, {"sparse", "packed"}}));
    v("enable_tree_training", enable_tree_training,
      "AReaL's key; false: tree_training_mode dense; true: any other; null: as tree_training_mode says");
    v("pad_to_maximum", pad_to_maximum,
      "AReaL's key, which its tree training needs; no effect: passes are never padded");
    v("packer", packer,
      "how the batch is packed into trees, with tree_training_mode packed or when auto tries packed",
      one_of({packers.begin(), packers.end()}));
    v("gradient_checkpointing", gradient_checkpointing,
      "AReaL's key; true: every pass recomputes each layer just before the layer's backward; false: no pass "
      "does; null: only if mb_spec.memory makes such a plan the fastest or the only one");
    v("activation_offload", activation_offload,
      "on a GPU; true: every pass that recomputes its layers keeps their inputs in host memory; false: no "
      "pass does; null: only if mb_spec.memory cannot hold them");
  }

  LayerRecompute layers() const {
    if (!gradient_checkpointing) return LayerRecompute::kWherePays;
    return *gradient_checkpointing ? LayerRecompute::kAlways : LayerRecompute::kNever;
  }

  ActivationOffload offload() const {
    if (!activation_offload) return ActivationOffload::kWhereNeeded;
    return *activation_offload ? ActivationOffload::kAlways : ActivationOffload::kNever;
  }

  // The strategy's name for make_plan.
  std::string strategy() const { return enable_tree_training == false ? "dense" : tree_training_mode; }

  // Throws UserError if settings contradict each other.
  void check() const {
    const bool is_dense = tree_training_mode == "dense", is_auto = tree_training_mode == "auto";
    if (enable_tree_training == true && is_dense)
      throw UserError(
          "enable_tree_training is true, but tree_training_mode is dense (AReaL's disabled), which "
          "shares no prefixes; leave one of them out");
    if (enable_tree_training == false && !is_dense && !is_auto)
      throw UserError(str("enable_tree_training is false, but tree_training_mode is ", tree_training_mode,
                          ", which computes shared prefixes once; leave one of them out"));
    if (activation_offload == true && gradient_checkpointing == false)
      throw UserError(
          "activation_offload is true, but gradient_checkpointing is false: then no pass keeps layer "
          "inputs for a recompute; leave one of them out");
    if (packer != "auto" && strategy() != "auto" && strategy() != "packed")
      throw UserError(str("packer is ", packer, ", but tree_training_mode ", strategy(),
                          " packs no trees; leave packer out, or set tree_training_mode to packed"));
  }
};

// Throws UserError if offload is required on a CPU. name: the option's name, for the message.
inline void check_offload(const std::string& name, ActivationOffload offload, bool is_cpu) {
  if (offload == ActivationOffload::kAlways && is_cpu)
    throw UserError(
        str(name, ": got true, expected a GPU: a CPU already computes in host memory; leave it out"));
}

// The critic of adv_estimator gae (critic.h): `critic` of a run's settings.
struct CriticSettings {
  std::optional<bool> share_backbone;
  std::string path;
  std::optional<double> eps_clip = 0.5;
  double loss_coef = 1.0;
  int64_t warmup_steps = 0;
  OptimizerSettings optimizer;

  template <class V>
  void visit(V& v) {
    v("share_backbone", share_backbone,
      "true: the critic reads the actor's hidden states; false: it has a model of its own; null: it has a "
      "model of its own if memory holds one");
    v("path", path,
      "model of a critic with a backbone of its own: a Hugging Face directory, or checkpoints/step_N/critic "
      "of a run; empty: a copy of model.path");
    v("eps_clip", eps_clip, "clip range of a value around its old value; null: no clip", above(0.0));
    v("loss_coef", loss_coef, "weight of the value loss; the policy loss has weight 1", above(0.0));
    v("warmup_steps", warmup_steps, "number of first steps that train only the critic", at_least(0));
    v("optimizer", optimizer, "AdamW of the critic; with a shared backbone, of value_head only");
  }
  // Throws UserError if settings contradict each other.
  void check() const {
    if (share_backbone.value_or(false) && !path.empty())
      throw UserError(str("critic.path is ", quoted(path),
                          ", but critic.share_backbone uses the actor's model; leave one of them out"));
  }
};

// Number of ranks per kind of parallelism (docs/ranks.md). Ranks split the batch (data), the tokens of a pass
// (context), each layer (tensor) and the list of layers (pipeline).
struct ParallelSizes {
  int64_t data = 1, context = 1, tensor = 1, pipeline = 1;
  int64_t all() const { return data * context * tensor * pipeline; }
};

// Parses AReaL's `NAME:d4p2c2t2` or `d4`: data parallel 4; pipeline, context and tensor parallel 2. nullopt
// if empty. Throws UserError for another form or another kind of parallelism.
std::optional<ParallelSizes> sizes_of_backend(const std::string& backend);

// Losses of a mixture's routers (router_losses.h), with transformers' names.
struct RouterLossSettings {
  double router_aux_loss_coef = 0;
  double router_z_loss_coef = 0;

  bool is_used() const { return router_aux_loss_coef > 0 || router_z_loss_coef > 0; }
  template <class V>
  void visit(V& v) {
    v("router_aux_loss_coef", router_aux_loss_coef,
      "mixtures of experts: weight of the load-balancing loss of the routers (docs/moe.md); 0: none",
      at_least(0.0));
    v("router_z_loss_coef", router_z_loss_coef,
      "mixtures of experts: weight of the z-loss of the routers (docs/moe.md); 0: none", at_least(0.0));
  }
};

struct ActorSettings {
  LoraSettings lora;  // the setting `lora`, which is not inside `actor`
  TreeTrainingSettings tree;
  MicroBatchSettings mb_spec;
  OptimizerSettings optimizer;
  LossSettings loss;
  AggregationSettings aggregation;
  AdvantageSettings advantages;
  RewardShapingSettings shaping;
  FilterSettings filters;
  int64_t ppo_n_minibatches = 1;
  int64_t ppo_epochs = 1;
  int64_t threads = 0;
  bool deterministic = false;
  std::string backend;
  std::string routing_replay = "none";
  std::string routing_differences = "exact";
  RouterLossSettings router_losses;

  bool replays_rollout_experts() const { return routing_replay == "R3"; }
  template <class V>
  void visit(V& v) {
    tree.visit(v);
    v("threads", threads,
      "training threads while generation and training run in parallel; 0: all but rollout.threads",
      range(0, 4096));
    v("deterministic", deterministic,
      "same weights on 1, 2, 4 and 8 ranks of one thread each: the batch is cut into 8 shards, each computed "
      "alone, and sums have a fixed order (docs/ranks.md)");
    v("backend", backend,
      "number of training ranks, with AReaL's names: ranks split the batch (d), the list of layers (p), the "
      "tokens of a pass (c) and each layer (t); fsdp:d4: 4 ranks, fsdp:d2c2t2: 8 ranks (docs/ranks.md); "
      "empty: all started ranks split the batch");
    v("routing_replay", routing_replay,
      "experts that a mixture trains each token with (docs/moe.md): none, those that the router chooses in "
      "each pass; R2, those of the trainer's pass before the first optimizer step of a batch; R3, those that "
      "generation recorded",
      one_of({"none", "R2", "R3"}));
    v("routing_differences", routing_differences,
      "R3: samples of one prompt whose records differ in a shared token: exact, the samples part there; "
      "majority, all get the most frequent record",
      one_of({"exact", "majority"}));
    router_losses.visit(v);
    v("mb_spec", mb_spec, "micro-batches");
    v("optimizer", optimizer, "AdamW");
    v("ppo_n_minibatches", ppo_n_minibatches,
      "number of mini-batches per batch, cut by whole groups; one optimizer step each", range(1, 10'000));
    v("ppo_epochs", ppo_epochs,
      "how often each batch is trained on; pi_old stays the policy before the first time", range(1, 10'000));
    loss.visit(v);
    aggregation.visit(v);
    advantages.visit(v);
    shaping.visit(v);
    filters.visit(v);
  }
  // The number of ranks of `backend`, nullopt if it is empty. Throws UserError as sizes_of_backend().
  std::optional<int64_t> num_ranks() const {
    const auto sizes = sizes_of_backend(backend);
    return sizes ? std::optional(sizes->all()) : std::nullopt;
  }
  // The sizes for `num_ranks` training ranks. Throws UserError if `backend` needs another number of ranks.
  ParallelSizes sizes_of(int64_t num_ranks) const;
  // Optimizer steps per batch.
  int64_t updates_per_batch() const { return ppo_n_minibatches * ppo_epochs; }

  // Whether the KL's reward of each token is part of the rewards that advantages are computed from.
  bool has_kl_rewards() const { return loss.kl_ctl != 0.0 && advantages.takes_kl_rewards(); }

  // Throws UserError if settings contradict each other.
  void check() const {
    tree.check();
    advantages.check();
    filters.check();
    if (const auto sizes = sizes_of_backend(backend); sizes && deterministic && sizes->all() > sizes->data)
      throw UserError(str(
          "actor.deterministic: got actor.backend ", backend,
          ", which splits passes over ranks, so sums have another order than in one process; expected ranks "
          "that only split the batch (fsdp:dN), or false"));
    if (mb_spec.counts() && tree.strategy() != "dense")
      throw UserError(str("mb_spec sets the number of micro-batches (n_mbs ", mb_spec.n_mbs, ", allocation ",
                          mb_spec.allocation, "), but tree_training_mode ", tree.strategy(),
                          " has none; leave n_mbs and allocation out, or set tree_training_mode to dense"));
    if (loss.use_decoupled_loss && loss.prox_logp_method == "reuse_train_logp" && updates_per_batch() > 1)
      throw UserError(str("prox_logp_method is reuse_train_logp with ppo_n_minibatches ", ppo_n_minibatches,
                          " and ppo_epochs ", ppo_epochs,
                          ": after the first optimizer step the training pass no longer computes pi_old; "
                          "expected 1 for both, or prox_logp_method recompute or loglinear"));
  }
};

// The sampling policy, if it is not the trained one (sparse_policy_trainer.h).
struct SparseTrainingSettings {
  std::string mode = "sparse";
  std::string draft_path;
  double kl_loss_coef = 0.001;
  std::string kl_loss_type = "k2";
  std::optional<double> lr_ratio;
  LoraSettings lora{.rank = 32};

  bool distills() const { return mode == "distill"; }
  bool is_draft() const { return mode == "draft"; }
  bool has_sparse_policy() const { return distills() || is_draft(); }
  bool trains_sparse() const { return mode == "sparse_to_sparse"; }

  template <class V>
  void visit(V& v) {
    v("mode", mode,
      "with rollout.sparse: sparse (only the dense policy is trained, on sparse samples), distill (like "
      "sparse; adapters also keep the generating policy close to the dense one), sparse_to_sparse (the "
      "sparse policy itself is trained), exact_top_k (sparse with rollout.sparse.summary exact; a slow "
      "baseline). With or without rollout.sparse: draft (another model generates and is kept close to the "
      "trained one)",
      aliased({"sparse", "distill", "sparse_to_sparse", "exact_top_k", "draft"}, {{"weak", "draft"}}));
    v("draft_path", draft_path,
      "draft: the model that generates; it needs the tokenizer of the trained model");
    v("kl_loss_coef", kl_loss_coef,
      "distill, draft: weight of the KL from the generating policy to the trained one", at_least(0.0));
    v("kl_loss_type", kl_loss_type,
      "distill, draft: the KL at a position: k2 and k3 estimate it from the sampled token; topk computes it "
      "over the gconfig.top_logprobs most likely tokens and the rest",
      one_of({"k2", "k3", "topk"}));
    v("lr_ratio", lr_ratio,
      "learning rate of the generating policy divided by actor.optimizer.lr; null: 5 for adapters, 1 for a "
      "draft model",
      above(0.0));
    v("lora", lora, "distill: the adapters");
  }
};

}  // namespace bough

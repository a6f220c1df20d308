// All settings of a run, as in its YAML file (docs/formats.md). Names follow AReaL where it has them.
// aliases() lists other spellings that are accepted, such as AReaL's actor.path for model.path.
#pragma once

#include <string>
#include <vector>

#include "base/settings.h"
#include "data/dataset.h"
#include "engine/settings.h"
#include "env/environment.h"
#include "env/reward.h"
#include "train/settings.h"

namespace bough {

// The values of a setting `dtype`, and the element type that `auto` stands for on a device.
inline Constraint dtype_choices() {
  return aliased({"auto", "fp32", "bf16", "fp64"},
                 {{"float32", "fp32"}, {"bfloat16", "bf16"}, {"float64", "fp64"}});
}
inline std::string dtype_on(const std::string& device) {
  return device == "cuda" ? "bf16" : "fp32";
}

// The weights of a model, and with how much precision the model computes.
struct ModelSettings {
  std::string path;
  std::string router_dtype = "fp32";
  std::string head_dtype = "model";

  template <class V>
  void visit(V& v) {
    v("path", path, "directory of the model, in Hugging Face's format");
    v("router_dtype", router_dtype,
      "for a mixture of experts in bf16, the precision of its routers' products: fp32 | model (rounded to "
      "bf16, "
      "as transformers does)",
      one_of({"fp32", "model"}));
    v("head_dtype", head_dtype,
      "for bf16, the type of the logits, in generation and training: model (bf16) | fp32 (sums not rounded)",
      one_of({"model", "fp32"}));
  }
};

struct EvaluatorSettings {
  int64_t freq_steps = 0;
  bool at_start = true;
  bool at_end = true;
  int64_t n_samples = 1;
  double temperature = 0.0;
  bool sparse = true;
  double timeout_seconds = 3600;

  template <class V>
  void visit(V& v) {
    v("freq_steps", freq_steps, "steps between evaluations; 0: none between start and end", at_least(0));
    v("at_start", at_start, "evaluate before the first step");
    v("at_end", at_end, "evaluate after the last step");
    v("n_samples", n_samples, "samples of each problem (k of avg@k and pass@k)", range(1, 10'000));
    v("temperature", temperature, "temperature of these samples; 0: the most likely token, with n_samples 1",
      range(0.0, 100.0));
    v("sparse", sparse,
      "with rollout.sparse: also evaluate the sparse policy, which generates (eval_sparse/*); eval/* is "
      "always "
      "the trained policy with dense attention");
    v("timeout_seconds", timeout_seconds, "seconds after which an evaluation is given up; the run continues",
      range(0.001, 1e9));
  }
  void check() const;  // throws UserError: several samples at temperature 0 would all be equal
};

struct CheckpointSettings {
  int64_t freq_steps = 0;
  double freq_minutes = 10;

  template <class V>
  void visit(V& v) {
    v("freq_steps", freq_steps, "steps between checkpoints; 0: by time only", at_least(0));
    v("freq_minutes", freq_minutes,
      "minutes since the last checkpoint after which one is written; 0: by steps only", at_least(0.0));
  }
};

struct SaverSettings : CheckpointSettings {
  int64_t keep = 2;
  bool rollouts = true;
  Bytes max_rollouts = {int64_t{16} << 30};

  template <class V>
  void visit(V& v) {
    CheckpointSettings::visit(v);
    v("keep", keep, "number of newest checkpoints to keep", range(1, 1'000'000));
    v("rollouts", rollouts,
      "save the batch of each step as rollouts/step_N.jsonl.zst, and dropped and waiting groups and the "
      "samples of evaluations under traces/");
    v("max_rollouts", max_rollouts,
      "bytes of rollouts/ and traces/ beyond which those of the oldest steps are removed; 0: no bound");
  }
};

// External agents that hold the run's conversations (control/external_rollouts.h, docs/serve.md).
struct ExternalRolloutSettings {
  std::optional<int64_t> port;
  std::string host = "127.0.0.1";
  std::string api_key_file;
  double lease_seconds = 3600;
  std::string tool_call_parser = "auto";
  std::string reasoning_parser;

  template <class V>
  void visit(V& v) {
    v("port", port,
      "port at which external agents hold the conversations, over OpenAI's and Anthropic's APIs; "
      "0: a free port; null: no external agents (docs/serve.md)",
      range(0, 65535));
    v("host", host, "address to listen at; all except loopback (127.0.0.1, ::1) need a key", not_empty());
    v("api_key_file", api_key_file,
      "file whose first line is the key for starting sessions; the environment variable BOUGH_API_KEY "
      "does the same");
    v("lease_seconds", lease_seconds,
      "seconds after which a group that an agent started is closed with its finished sessions; with fewer "
      "than rollout.min_group it is dropped",
      range(0.01, 1e9));
    v("tool_call_parser", tool_call_parser,
      "format of the model's tool calls (docs/chat.md); auto: the one whose markers the chat template has; "
      "empty: no tools");
    v("reasoning_parser", reasoning_parser,
      "format of the model's reasoning (docs/chat.md); empty: plain text");
  }
};

struct ReportSettings {
  std::optional<int64_t> port;

  template <class V>
  void visit(V& v) {
    v("port", port,
      "port on 127.0.0.1 at which the run serves its page while it works; 0: a free port; null: none "
      "(`bough view` shows the run, too)",
      range(0, 65535));
  }
};

struct RunSettings {
  std::string experiment_name = "experiment";
  std::string trial_name = "trial0";
  std::string fileroot = "runs";
  int64_t seed = 1;
  std::string device = "cpu";
  std::string dtype = "auto";
  int64_t threads = 0;
  RewardEntries reward;
  RewardSettings reward_service;
  EnvironmentSettings environment;
  ExternalRolloutSettings serve;
  std::string filter;
  ModelSettings model;
  ModelSettings ref;
  DatasetSettings train_dataset;
  DatasetSettings valid_dataset = {.path = "", .shuffle = false};
  SamplingParameters gconfig = {.n_samples = 8};
  RolloutSettings rollout;
  ActorSettings actor;
  SparseTrainingSettings sparse_training;
  CriticSettings critic;
  EvaluatorSettings evaluator;
  SaverSettings saver;
  ReportSettings report;
  int64_t total_train_steps = 0;
  int64_t total_train_epochs = 1;
  int64_t compare_dense = 0;
  double stall_seconds = 1800;
  std::string calibration;
  std::string allocation_mode;

  template <class V>
  void visit(V& v) {
    v("experiment_name", experiment_name, "the run's folder is <fileroot>/<experiment_name>/<trial_name>",
      not_empty());
    v("trial_name", trial_name, "name of the run in its experiment; another name starts another run",
      not_empty());
    v("fileroot", fileroot, "folder of all runs", not_empty());
    v("seed", seed, "seeds all random numbers", range(0, 1e15));
    v("device", device, "device that trains and generates", one_of({"cpu", "cuda"}));
    v("dtype", dtype,
      "element type of the model; gradients and the optimizer (of bf16 models with master weights) are fp32, "
      "for fp64 models fp64; auto: fp32, on a GPU bf16",
      dtype_choices());
    v("threads", threads, "compute threads; 0: one per core", range(0, 4096));
    v("reward", reward,
      "FILE.py:FUNCTION, http://..., a built-in verifier (number), or a list of rewards to add up; "
      "empty: number");
    v("reward_service", reward_service, "how rewards are computed");
    v("environment", environment, "environment of conversations with several turns");
    v("serve", serve, "external agents that hold the conversations");
    v("filter", filter,
      "FILE.py:FUNCTION that decides whether a scored group is trained on or replaced by another one; "
      "empty: none (docs/add_a_filter.md)");
    v("model", model, "the model to train");
    v("ref", ref, "reference model of the KL term; empty path: the initial model");
    v("train_dataset", train_dataset, "problems to train on");
    v("valid_dataset", valid_dataset, "problems to evaluate on, never trained on; empty path: no evaluation");
    v("gconfig", gconfig, "sampling parameters of training samples");
    v("rollout", rollout, "how samples are generated");
    v("sparse_training", sparse_training, "training on samples of sparse attention (rollout.sparse)");
    v("actor", actor, "how the model is trained");
    v("lora", actor.lora, "train low-rank adapters in place of the model's weights");
    v("critic", critic, "the model that predicts values, for actor.adv_estimator gae");
    v("evaluator", evaluator, "when and how the model is evaluated");
    v("saver", saver, "checkpoints");
    v("report", report, "the page of the run");
    v("total_train_steps", total_train_steps, "number of training steps; 0: by total_train_epochs",
      at_least(0));
    v("total_train_epochs", total_train_epochs,
      "epochs over the training problems, if total_train_steps is 0", at_least(1));
    v("calibration", calibration,
      "calibration.json for the planner; empty: this machine is measured once, and the file saved with the "
      "run");
    v("stall_seconds", stall_seconds,
      "seconds without progress in any thread after which the run ends and reports what each thread does; "
      "0: never. Must exceed the longest training step",
      at_least(0.0));
    v("allocation_mode", allocation_mode,
      "AReaL's short form of rollout.backend and actor.backend, for example sglang:d4+fsdp:d8; "
      "embedded:d2+fsdp:d6: 2 of 8 ranks generate; fsdp:d8: all ranks train and generate");
    v("compare_dense", compare_dense,
      "number of last batches to time with and without the prefix tree after training; 0: none",
      range(0, 100));
  }
  void complete();  // sets what depends on the device, and expands allocation_mode
  void check() const;
  static SettingAliases aliases();

  // Returns the sampling settings of evaluation. n_samples and temperature are the evaluator's.
  // max_new_tokens, stop and stop_token_ids are gconfig's. All others have their defaults.
  SamplingParameters evaluation_sampling() const;

  // Whether the policy that generates differs from the trained policy by sparse attention. Evaluation then
  // takes both policies. False with a draft policy, which is another model, and with servers.
  bool generates_with_sparse_policy() const {
    return rollout.sparse.is_sparse() && !sparse_training.is_draft() && !rollout.has_servers();
  }
};

// Compiled once, in run_settings.cpp, because it takes seconds.
extern template SettingField describe_settings(RunSettings& settings);

// Whether a key may change when a run is resumed. Such keys affect how long the run is, what is written and
// shown, where files are, or how long and how often rewards are tried. They do not affect what a step
// computes.
bool is_harmless_change(const std::string& key);

}  // namespace bough

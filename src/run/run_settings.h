// All settings of a run, as in its YAML file (docs/formats.md). Names follow AReaL where it has them. AReaL's
// own spellings are accepted as aliases.
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

struct ModelSettings {
  std::string path;

  template <class V>
  void visit(V& v) {
    v("path", path, "a Hugging Face directory");
  }
};

struct EvaluatorSettings {
  int64_t freq_steps = 0;
  bool at_start = true;
  bool at_end = true;
  int64_t n_samples = 1;
  double temperature = 0.0;
  double timeout_seconds = 3600;

  template <class V>
  void visit(V& v) {
    v("freq_steps", freq_steps, "evaluate every so many steps; 0: not between start and end", at_least(0));
    v("at_start", at_start, "evaluate before the first step");
    v("at_end", at_end, "evaluate after the last step");
    v("n_samples", n_samples, "samples of each problem (k of avg@k and pass@k)", range(1, 10'000));
    v("temperature", temperature, "of these samples; 0: the most likely token, with n_samples 1",
      range(0.0, 100.0));
    v("timeout_seconds", timeout_seconds, "an evaluation that takes longer is given up, and the run goes on",
      range(0.001, 1e9));
  }
  void check() const;  // throws UserError: several samples at temperature 0 would all be equal
};

struct SaverSettings {
  int64_t freq_steps = 0;
  double freq_minutes = 10;
  int64_t keep = 2;
  bool rollouts = true;

  template <class V>
  void visit(V& v) {
    v("freq_steps", freq_steps, "a checkpoint every so many steps; 0: by time only", at_least(0));
    v("freq_minutes", freq_minutes, "and whenever this time has passed since the last; 0: by steps only",
      at_least(0.0));
    v("keep", keep, "newest checkpoints kept", range(1, 1'000'000));
    v("rollouts", rollouts, "keep what each step was trained on, as rollouts/step_N.jsonl.zst");
  }
};

// External agents that hold the run's conversations (control/external_rollouts.h, docs/serve.md).
struct ExternalRolloutSettings {
  std::optional<int64_t> port;
  std::string host = "127.0.0.1";
  std::string api_key_file;
  double lease_seconds = 3600;
  std::string tool_call_parser;
  std::string reasoning_parser;

  template <class V>
  void visit(V& v) {
    v("port", port,
      "agents written elsewhere hold the conversations, over OpenAI's and Anthropic's APIs at this port; 0: "
      "a "
      "free one; null: none do (docs/serve.md)",
      range(0, 65535));
    v("host", host, "address to listen at; any but this machine's own (127.0.0.1, ::1) needs a key",
      not_empty());
    v("api_key_file", api_key_file,
      "file whose first line is the key that starting a session needs; the environment's BOUGH_API_KEY does "
      "the same");
    v("lease_seconds", lease_seconds,
      "a group that an agent has begun is closed after this time with what it has, or dropped with fewer "
      "than "
      "rollout.min_group sessions",
      range(0.01, 1e9));
    v("tool_call_parser", tool_call_parser,
      "how the model writes tool calls (docs/chat.md); empty: no tools");
    v("reasoning_parser", reasoning_parser, "how the model writes reasoning (docs/chat.md); empty: as text");
  }
};

struct RunSettings {
  std::string experiment_name = "experiment";
  std::string trial_name = "trial0";
  std::string fileroot = "runs";
  int64_t seed = 1;
  std::string device = "cpu";
  std::string dtype = "fp32";
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
    v("trial_name", trial_name, "another name is another run", not_empty());
    v("fileroot", fileroot, "where runs go", not_empty());
    v("seed", seed, "of every random draw", range(0, 1e15));
    v("device", device, "what trains and generates", one_of({"cpu", "cuda"}));
    v("dtype", dtype, "element type of the model; gradients and the optimizer are fp32, or fp64",
      aliased({"fp32", "bf16", "fp64"}, {{"float32", "fp32"}, {"bfloat16", "bf16"}, {"float64", "fp64"}}));
    v("threads", threads, "threads that compute; 0: one a core", range(0, 4096));
    v("reward", reward,
      "FILE.py:FUNCTION, http://..., a built-in verifier (number), or a list of rewards that are added up; "
      "empty: number");
    v("reward_service", reward_service, "how rewards are computed");
    v("environment", environment, "what conversations of several turns are held with");
    v("serve", serve, "agents outside that hold the conversations");
    v("filter", filter,
      "FILE.py:FUNCTION that says of a scored group whether it is trained on, else another one is drawn; "
      "empty: "
      "none (docs/add_a_filter.md)");
    v("model", model, "what is trained");
    v("ref", ref, "the reference of the KL term; empty: the model as it was before the first step");
    v("train_dataset", train_dataset, "problems to train on");
    v("valid_dataset", valid_dataset, "problems to evaluate on, never trained on; empty path: no evaluation");
    v("gconfig", gconfig, "what a sample is");
    v("rollout", rollout, "how samples are generated");
    v("sparse_training", sparse_training, "what is trained of samples that rollout.sparse generates");
    v("actor", actor, "how the model is trained");
    v("lora", actor.lora, "train low-rank adapters in place of the model's weights");
    v("critic", critic, "of actor.adv_estimator gae: the model that values tokens");
    v("evaluator", evaluator, "when and how the model is evaluated");
    v("saver", saver, "checkpoints");
    v("total_train_steps", total_train_steps, "steps of the run; 0: by epochs", at_least(0));
    v("total_train_epochs", total_train_epochs,
      "passes over the training problems, where total_train_steps is 0", at_least(1));
    v("calibration", calibration,
      "a calibration.json to make plans from; empty: this machine's, measured once, saved with the run");
    v("stall_seconds", stall_seconds,
      "a run in which no thread has begun or finished anything for so long ends, and says who was busy with "
      "what; 0: never. Longer than the longest step of training",
      at_least(0.0));
    v("allocation_mode", allocation_mode,
      "AReaL's, as sglang:d4+fsdp:d8: stands for rollout.backend and actor.backend; embedded:d2+fsdp:d6: "
      "of 8 ranks 2 generate; fsdp:d8 alone: all do");
    v("compare_dense", compare_dense,
      "after training, time this many of the last batches with and without the tree; 0: do not",
      range(0, 100));
  }
  void complete();  // expands allocation_mode
  void check() const;
  static SettingAliases aliases();

  // Returns the sampling settings of evaluation. n_samples and temperature are the evaluator's.
  // max_new_tokens, stop and stop_token_ids are gconfig's. All others have their defaults.
  SamplingParameters evaluation_sampling() const;
};

// Compiled once, in run_settings.cpp, because it takes seconds.
extern template SettingField describe_settings(RunSettings& settings);

// Whether a key may change when a run is resumed. Such keys affect how long the run is, what is written and
// shown, where files are, or how long and how often rewards are tried. They do not affect what a step
// computes.
bool is_harmless_change(const std::string& key);

}  // namespace bough

// Supervised fine-tuning: the loss is the mean of -log pi over the tokens of completions. Batches are prefix
// trees, too: a header of worked examples that all prompts share is computed once per batch.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "base/json.h"
#include "run/run_settings.h"

namespace bough {

struct SftSettings {
  ModelSettings model;
  std::string out;
  DatasetSettings train_dataset;
  std::string learned_messages = "last";
  int64_t epochs = 1;
  int64_t max_steps = 0;
  int64_t seed = 1;
  std::string device = "cpu";
  std::string dtype = "auto";
  TreeTrainingSettings tree;
  MicroBatchSettings mb_spec;
  RouterLossSettings router_losses;
  LoraSettings lora;
  OptimizerSettings optimizer = {.lr = 1e-4, .lr_scheduler_type = "cosine"};
  CheckpointSettings saver;

  template <class V>
  void visit(V& v) {
    v("model", model, "the model to train");
    v("out", out, "folder to write the model to");
    v("train_dataset", train_dataset,
      "examples with messages, prompt and completion, or question and answer");
    v("learned_messages", learned_messages,
      "the assistant's messages of a conversation that are learned: the last one; or all, each of which "
      "follows the messages before it as the chat template shows them",
      one_of({"last", "all"}));
    v("epochs", epochs, "epochs over the examples", at_least(1));
    v("max_steps", max_steps, "number of steps; 0: by epochs", at_least(0));
    v("seed", seed, "seeds the order of examples and new adapters", range(0, 1e15));
    v("device", device, "device that trains", one_of({"cpu", "cuda"}));
    v("dtype", dtype, "element type of the model; auto: fp32, on a GPU bf16", dtype_choices());
    tree.visit(v);
    v("mb_spec", mb_spec, "size of the passes");
    router_losses.visit(v);
    v("lora", lora, "train low-rank adapters in place of the model's weights; `out` gets the adapter");
    v("optimizer", optimizer, "AdamW");
    v("saver", saver, "checkpoints, from which the same command continues");
  }
  void complete() {  // sets what depends on the device
    if (dtype == "auto") dtype = dtype_on(device);
    mb_spec.complete_for(device);
  }
  void check() const;
  static SettingAliases aliases() {
    return {{"lora.r", "lora.rank"},
            {"lora.lora_alpha", "lora.alpha"},
            {"lora.target_modules", "lora.targets"},
            {"lora.lora_dropout", "lora.dropout"},
            {"max_length", "train_dataset.max_length"}};
  }
};

struct SftSummary {
  int64_t examples = 0;  // with learned_messages: all, conversations
  int64_t steps = 0;
  double first_loss = 0, last_loss = 0;    // mean over the first and last tenth of the steps, nats per token
  std::optional<double> aux_loss, z_loss;  // of the last step's routers, without coefficients; if used
  int64_t trained_tokens = 0;              // of completions, all steps
  double compression = 1;                  // flat tokens over tree tokens, all steps
  double seconds = 0;
};

struct SftOptions {
  std::function<bool()> stop;  // checked between steps; true: writes a checkpoint, throws Interrupted
  bool show_progress = true;
};

// Trains and writes the Hugging Face directory `out`, or PEFT's if adapters are trained. Until then
// OUT/unfinished has the last checkpoint (train/run_checkpoint.h) and the settings. If it exists, continues
// from there, with the bits of a training that was not interrupted. Throws UserError as read_sft does, if an
// example does not fit the model's positions (setting overlong_prompts), if no token is trained, and if
// OUT/unfinished has other settings or examples.
SftSummary run_sft(const SftSettings& settings, const SftOptions& options);

Json to_json(const SftSummary& summary);

}  // namespace bough

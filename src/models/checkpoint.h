// Models to and from Hugging Face directories: config.json, model.safetensors (or shards with
// model.safetensors.index.json), generation_config.json, the tokenizer's files.
//
// A Parameter may hold several of the checkpoint's tensors as ranges of rows (q, k, v); each part is stored
// under its own name, so that transformers.AutoModelForCausalLM.from_pretrained reads the directory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "models/model.h"
#include "models/safetensors.h"

namespace bough {

// load_model: model.h.

// Fills the model's parameters, converting to its dtype and device. UserError lists what is missing, extra or
// of the wrong shape; the model is then unchanged. Ignored: lm_head.weight where the head is tied, and the
// rotary inv_freq buffers of old checkpoints.
void load_weights(const std::filesystem::path& directory, Model& model);

struct SaveOptions {
  std::optional<at::ScalarType> dtype;      // stored as; the model's own if not given
  int64_t max_shard_bytes = 5'000'000'000;  // one tensor is never cut, so a shard may be larger
  std::filesystem::path copy_from;  // a directory whose tokenizer files and generation_config.json go along
  Json generation_config;           // an object: written instead of copy_from's
};

// Writes the directory, made if it is missing; other files in it stay. Config and weights are written aside
// before the first is renamed: a full disk (IoError) leaves the model that was there. A process killed
// between two renames may leave a mixture; to exclude that, save into a new folder and publish it.
void save_model(const std::filesystem::path& directory, Model& model, const SaveOptions& options = {});

// Every tensor of the model under its Hugging Face name, as views of the parameters; and of what is trained,
// views of the main_grads. Of a model that ranks share a call of all of them, which get whole tensors: the
// first stage (pipeline.h) of all layers, the others of their own.
NamedTensors named_weights(Model& model);
NamedTensors named_gradients(Model& model);

// A complete config.json for a model that has none, in the form that transformers 5.17 writes. Token ids
// (bos, eos, pad) are null: whoever knows the tokenizer fills them in.
Json write_model_config(const ModelConfig& config);

}  // namespace bough

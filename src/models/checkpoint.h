// Loads and saves models as Hugging Face directories: config.json, model.safetensors (or shards with
// model.safetensors.index.json), generation_config.json, the tokenizer's files.
//
// A Parameter may hold several of the checkpoint's tensors as ranges of rows (q, k, v). Each part is stored
// under its own name, so transformers.AutoModelForCausalLM.from_pretrained can read the directory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "models/model.h"
#include "models/safetensors.h"

namespace bough {

// load_model() is in model.h.

// Fills the model's parameters, converted to its dtype and device. Ignores the rotary inv_freq buffers of old
// checkpoints: config.json sets the angles, as in transformers. If the lm_head is tied, the file may have it
// under either name, or under both with equal values. Throws UserError if tensors are missing, extra or of
// the wrong shape, or if a tied lm_head differs from the embedding. The message lists them, and the model is
// unchanged.
void load_weights(const std::filesystem::path& directory, Model& model);

// The type that holds the values of all weights of a directory, by the tensors themselves: the key dtype of
// config.json may differ from them.
at::ScalarType stored_type(const std::filesystem::path& directory);

struct SaveOptions {
  std::optional<at::ScalarType> dtype;      // stored dtype; the model's dtype if empty
  int64_t max_shard_bytes = 5'000'000'000;  // a tensor is never split, so a shard may be larger
  // Directory whose tokenizer files and generation_config.json are copied. If the tokenizer's files name more
  // stop tokens (text/stop_tokens.h), the copied generation_config.json lists them too.
  std::filesystem::path copy_from;
  Json generation_config;  // if an object, written instead of copy_from's file
};

// Writes the model into the directory, which is created if it is missing. Other files in it stay. Config and
// weights are written to temporary files before the first rename. So a full disk (IoError) keeps the previous
// model. A process killed between two renames may leave a mixture. To exclude this, save into a new directory
// and rename the directory. If ranks share the model, this is a collective call and one rank writes.
void save_model(const std::filesystem::path& directory, Model& model, const SaveOptions& options = {});

// named_weights: every tensor of the model under its Hugging Face name, as views of the parameters.
// named_gradients: the same for the trained parameters, as views of the main_grads.
// If ranks share the model, these are collective calls that return unsharded tensors. The first stage
// (pipeline_stage.h) gets all layers, every other stage its own layers.
NamedTensors named_weights(Model& model);
NamedTensors named_gradients(Model& model);

}  // namespace bough

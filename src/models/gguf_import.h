// A GGUF file to a Hugging Face model directory: config.json, model.safetensors, tokenizer.json,
// tokenizer_config.json (with the chat template), generation_config.json.
//
// Values are the file's own, dequantised (gguf.h), rounded once where they are stored in bf16. Where
// llama.cpp reorders rows (the rotary pairs of llama's q and k) the order of Hugging Face is restored.
// Architectures are a table in gguf_import.cpp; others, and metadata or tensors that the table does not know,
// are refused by name: nothing is dropped that might change the result.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "models/gguf_tokenizer.h"

namespace bough {

struct ImportOptions {
  // What weights are stored in, fp32 or bf16. Where none is given: bf16 for files whose matrices are BF16 or
  // quantised, and fp32, which loses nothing, where one is F32 or F16.
  std::optional<at::ScalarType> dtype;
  std::string pre;     // read_gguf_tokenizer()
  bool force = false;  // replace a model directory that is there
};

struct ImportReport {
  std::string architecture;  // of the config: "LlamaForCausalLM"
  std::string tokenizer;
  int64_t num_parameters = 0;
  int64_t num_tokens = 0;
  at::ScalarType dtype = at::kFloat;
};

// Writes the directory beside `directory` and renames it when it is complete. One tensor is in memory at a
// time, in fp32 and in what it is stored in. UserError: the file, or a directory that is there and not empty
// without `force` (with it, one that holds no config.json is no model and stays too); IoError: a full disk.
ImportReport import_gguf(const std::filesystem::path& file, const std::filesystem::path& directory,
                         const ImportOptions& options);

}  // namespace bough

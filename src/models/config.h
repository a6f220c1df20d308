// What a Hugging Face config.json says of a decoder, as far as Bough computes it.
//
// Supported: Qwen3ForCausalLM, Qwen2ForCausalLM (Qwen2.5), LlamaForCausalLM (Llama 3). Whatever would change
// the result and is not supported (other architectures, rope scaling, sliding windows, other activations,
// attention dropout, quantised weights) is refused by name with a UserError, never computed wrongly.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/json.h"

namespace bough {

enum class Architecture { kQwen3, kQwen2, kLlama };

struct ModelConfig {
  Architecture architecture = Architecture::kQwen3;
  int64_t vocab_size = 0;         // V
  int64_t hidden_size = 0;        // D
  int64_t intermediate_size = 0;  // F
  int64_t num_layers = 0;         // L
  int64_t num_heads = 0;          // N, query heads
  int64_t num_kv_heads = 0;       // G
  int64_t head_dim = 0;           // H
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double rope_theta = 1e4;
  bool tie_word_embeddings = false;  // the head is the embedding; checkpoints then hold it once
  bool qkv_bias = false;             // Qwen2.5; Llama with attention_bias
  bool output_bias = false;          // Llama with attention_bias: o_proj too
  bool qk_norm = false;              // Qwen3: RMSNorm over each head of q and k, before the rotary embedding
  std::string torch_dtype = "float32";  // what the checkpoint says it is stored in (dtype or torch_dtype)
  Json source;                          // config.json as read, so that saving changes nothing else

  int64_t num_parameters() const;  // tied weights once
};

// Reads and checks config.json. UserError names file, key, got, expected, remedy.
ModelConfig parse_model_config(const Json& config, const std::string& where);
ModelConfig load_model_config(const std::filesystem::path& directory);

// Stop tokens: generation_config.json's eos_token_id (a number or a list), else config.json's; may be empty.
std::vector<int32_t> load_stop_tokens(const std::filesystem::path& directory);

}  // namespace bough

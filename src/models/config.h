// What a Hugging Face config.json says of a decoder, as far as Bough computes it.
//
// docs/models.md lists the families. A layer is described by what it has (norms, biases, rotary embedding),
// not by its family's name. Whatever would change the result and is not computed (other architectures, logit
// soft-capping, quantised weights) is refused by name with a UserError, never computed wrongly. No torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "base/json.h"
#include "kernels/common/element_types.h"
#include "models/rope.h"

namespace bough {

enum class Architecture { kQwen3, kQwen2, kLlama, kMistral, kGemma2, kGemma3, kSmolLM3, kPhi3, kOlmo2 };

// Names as config.json's `architectures` and `model_type` have them.
const char* class_name(Architecture architecture);
const char* model_type(Architecture architecture);
// The architecture of a model_type; UserError lists the names.
Architecture architecture_of(const std::string& model_type);

enum class LayerRope { kGlobal, kLocal, kNone };

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
  // The longest sequence that is computed as the model means it, and what changes beyond it. A longer one is
  // refused: in generation as one beyond max_position_embeddings, in training by the executor.
  int64_t max_exact_length = std::numeric_limits<int64_t>::max();
  std::string beyond_exact_length;

  double rms_norm_eps = 1e-6;
  double norm_weight_offset = 0;  // 1 in Gemma: the norms multiply by 1 + weight
  bool pre_norms = true;          // of what attention and feed-forward layer read
  bool post_norms = false;        // of what they add to the residual (Gemma; OLMo 2 has these only)
  bool qk_norm = false;           // RMSNorm of q and k before the rotary embedding: of each head (Qwen3), or
  bool qk_norm_over_width = false;  // of all heads together (OLMo 2)

  Rope rope;
  Rope local_rope;                     // Gemma 3's layers with a sliding window
  std::vector<LayerRope> layer_ropes;  // of each layer; empty: all kGlobal
  int64_t rotary_dim = 0;              // elements of a head that are turned, the first ones; 0: all
  double query_scale = 0;              // scores are divided by its root; 0: by head_dim's
  GateActivation activation = GateActivation::kSilu;
  bool scale_embedding = false;                // by sqrt(D) (Gemma)
  bool tie_word_embeddings = false;            // the head is the embedding; checkpoints then hold it once
  bool computes_logits = true;                 // else a tied model's last stage (pipeline.h) has no embedding
  bool qkv_bias = false, output_bias = false;  // of attention's projections
  bool mlp_bias = false;
  bool fused_projections = false;       // checkpoints hold qkv_proj and gate_up_proj (Phi-3)
  std::string torch_dtype = "float32";  // what the checkpoint says it is stored in (dtype or torch_dtype)
  Json source;                          // config.json as read, so that saving changes nothing else

  int64_t query_width() const { return num_heads * head_dim; }
  int64_t key_width() const { return num_kv_heads * head_dim; }
  NormSettings norm() const { return {rms_norm_eps, norm_weight_offset}; }
  int64_t turned_elements() const { return rotary_dim ? rotary_dim : head_dim; }
  LayerRope layer_rope(int64_t layer) const {
    return layer_ropes.empty() ? LayerRope::kGlobal : layer_ropes[static_cast<size_t>(layer)];
  }
  // What q · k is multiplied by before the softmax.
  double attention_scale() const {
    return 1 / std::sqrt(query_scale > 0 ? query_scale : static_cast<double>(head_dim));
  }
  // The longest sequence that is generated or trained on, and why.
  int64_t max_length() const { return std::min(max_position_embeddings, max_exact_length); }
  std::string max_length_reason() const {
    return max_exact_length < max_position_embeddings ? beyond_exact_length
                                                      : "its positions (max_position_embeddings)";
  }
  int64_t num_parameters() const;  // tied weights once
};

// Reads and checks config.json. UserError names file, key, got, expected, remedy.
ModelConfig parse_model_config(const Json& config, const std::string& where);
ModelConfig load_model_config(const std::filesystem::path& directory);

// Stop tokens: generation_config.json's eos_token_id (a number or a list), else config.json's; may be empty.
std::vector<int32_t> load_stop_tokens(const std::filesystem::path& directory);

}  // namespace bough

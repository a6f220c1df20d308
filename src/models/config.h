// A decoder's architecture, read from a Hugging Face config.json.
//
// docs/models.md lists the families, models/family.h what distinguishes them. A layer is described by its
// features (norms, biases, rotary embedding), not by its family. A setting that changes the result but is not
// implemented (other architectures, logit soft-capping, quantised weights) throws a UserError that names it.
// No torch.
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
#include "models/family.h"
#include "models/rope.h"

namespace bough {

enum class LayerRope { kGlobal, kLocal, kNone };

struct ModelConfig : LayerFeatures {
  const Family* family = &families::qwen3;
  int64_t vocab_size = 0;         // V
  int64_t hidden_size = 0;        // D
  int64_t intermediate_size = 0;  // F
  int64_t num_layers = 0;         // L
  int64_t num_heads = 0;          // N, query heads
  int64_t num_kv_heads = 0;       // G
  int64_t head_dim = 0;           // H
  int64_t max_position_embeddings = 0;
  // The longest sequence that is computed exactly as the model defines it. beyond_exact_length: the reason
  // for the limit, for messages. Longer sequences are refused in generation (max_length) and by the executor.
  int64_t max_exact_length = std::numeric_limits<int64_t>::max();
  std::string beyond_exact_length;

  double rms_norm_eps = 1e-6;
  Rope rope;
  Rope local_rope;                     // Gemma 3's layers with a sliding window
  std::vector<LayerRope> layer_ropes;  // per layer; empty: all kGlobal
  int64_t rotary_dim = 0;              // the first elements of a head that are rotated; 0: all
  // Mixtures of experts. A sparse layer has a router and num_experts feed-forward networks in place of one.
  int64_t num_experts = 0;               // E; 0: no layer is sparse
  int64_t experts_per_token = 0;         // K
  int64_t expert_intermediate_size = 0;  // F of an expert; intermediate_size is that of dense layers
  bool renormalises_experts = false;     // a token's K weights are divided by their sum
  std::vector<uint8_t> dense_layers;     // per layer of a mixture: 1 if it is dense; empty: all are sparse
  double clip_qkv = 0;                   // above 0: q, k and v are clamped to +- clip_qkv (OLMoE)
  bool tie_word_embeddings = false;      // the lm_head is the embedding; checkpoints have it once
  bool computes_logits = true;           // false (a critic's backbone): the last stage has no tied lm_head
  std::string torch_dtype = "float32";   // dtype of the checkpoint (key dtype or torch_dtype)
  Json source;                           // config.json as read, so saving keeps all other keys

  int64_t query_width() const { return num_heads * head_dim; }
  int64_t key_width() const { return num_kv_heads * head_dim; }
  NormSettings norm() const { return {rms_norm_eps, norm_weight_offset}; }
  int64_t turned_elements() const { return rotary_dim ? rotary_dim : head_dim; }
  LayerRope layer_rope(int64_t layer) const {
    return layer_ropes.empty() ? LayerRope::kGlobal : layer_ropes[static_cast<size_t>(layer)];
  }
  bool is_mixture() const { return num_experts > 0; }
  bool is_sparse(int64_t layer) const {
    return is_mixture() && (dense_layers.empty() || !dense_layers[static_cast<size_t>(layer)]);
  }
  int64_t num_sparse_layers() const;
  int64_t num_dense_layers() const { return num_layers - num_sparse_layers(); }
  // Elements of gate that a token uses in the feed-forward part: in one layer's experts, in the widest layer,
  // and in all layers together.
  int64_t expert_elements() const { return experts_per_token * expert_intermediate_size; }
  int64_t widest_feed_forward() const;
  int64_t feed_forward_elements() const {
    return num_dense_layers() * intermediate_size + num_sparse_layers() * expert_elements();
  }
  // q · k is multiplied by this factor before the softmax.
  double attention_scale() const {
    return 1 / std::sqrt(query_scale > 0 ? query_scale : static_cast<double>(head_dim));
  }
  // The longest sequence that may be generated, and the reason for the limit.
  int64_t max_length() const { return std::min(max_position_embeddings, max_exact_length); }
  std::string max_length_reason() const {
    return max_exact_length < max_position_embeddings ? beyond_exact_length
                                                      : "its positions (max_position_embeddings)";
  }
  int64_t num_parameters() const;  // tied weights once
};

// Returns the name of an activation in config.json.
const char* activation_name(GateActivation activation);

// Reads and checks config.json. Throws UserError if it is invalid or unsupported. The message names file,
// key, value, what was expected and a remedy.
ModelConfig parse_model_config(const Json& config, const std::string& where);
ModelConfig load_model_config(const std::filesystem::path& directory);

// Returns a complete config.json for a model without one, as transformers 5.17 writes it. The token ids (bos,
// eos, pad) are null; the caller fills them in from the tokenizer.
Json write_model_config(const ModelConfig& config);

}  // namespace bough

// The list of model families. To add a family of known features, write a file in families/ that defines its
// Family, and add a line to the list below (docs/add_a_model.md). Close relatives may share a file.
//
// config.cpp reads a config.json by the fields of its Family. write_config.cpp writes the keys by the same
// fields. No other code distinguishes families. No torch.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "kernels/common/element_types.h"

namespace bough {

class ConfigKeys;
struct ModelConfig;

// The features of a decoder layer, with Llama's as defaults. models/decoder.cpp computes every combination.
struct LayerFeatures {
  double norm_weight_offset = 0;    // 1 in Gemma: the norms multiply by 1 + weight
  bool pre_norms = true;            // RMSNorm of the input of attention and feed-forward layer
  bool post_norms = false;          // RMSNorm of their output (Gemma; OLMo 2 has only these)
  bool qk_norm = false;             // RMSNorm of each head of q and k, before the rotary embedding (Qwen3)
  bool qk_norm_over_width = false;  // the same over all heads together (OLMo 2)
  double query_scale = 0;           // scores are divided by sqrt(query_scale); 0: by sqrt(head_dim)
  GateActivation activation = GateActivation::kSilu;
  bool scale_embedding = false;                // multiply embeddings by sqrt(D) (Gemma)
  bool qkv_bias = false, output_bias = false;  // attention's projections
  bool mlp_bias = false;
  bool fused_projections = false;  // checkpoints have qkv_proj and gate_up_proj (Phi-3)
};

// The layers that have a sliding window. If config.json has layer_types, this key decides, in every family
// without in_every_layer.
struct SlidingWindows {
  int64_t default_size = 0;     // size if sliding_window is absent; 0: there are no windows then
  bool opt_in = false;          // reads use_sliding_window, false if absent; other families ignore this key
  bool required = false;        // sliding_window must not be null
  bool in_every_layer = false;  // if there is a window, all layers have it: the class ignores layer_types
  // Called if layer_types is absent: returns whether the layer has a window. nullptr: no layer has one.
  bool (*in_layer)(const ConfigKeys& keys, int64_t layer) = nullptr;

  bool any() const { return default_size > 0 || opt_in || in_every_layer || in_layer; }
};

// The sparse layers of a mixture of experts: a router and num_experts feed-forward networks, of which each
// token uses num_experts_per_tok.
struct Experts {
  // The key of the number of experts in a written config.json; nullptr: the family has no experts. Both
  // num_experts and num_local_experts are read, because the classes take one for the other.
  const char* count_key = nullptr;
  const char* size_key = "intermediate_size";  // F of an expert
  bool always_renormalises = false;            // false: norm_topk_prob says so, false if absent
  double aux_loss_coef = 0.001;                // router_aux_loss_coef of a written config.json
  // Tensors in checkpoints, for example model.layers.0.BLOCK.gate.weight (the router) and
  // model.layers.0.BLOCK.experts.7.GATE.weight.
  const char *block = "mlp", *gate = "gate_proj", *up = "up_proj", *down = "down_proj";

  bool any() const { return count_key; }
};

// Everything that distinguishes one family from the others. Names, defaults and keys are those of the
// transformers class.
struct Family {
  const char* class_name;  // value of `architectures`
  const char* model_type;
  const char* name;  // in messages

  // Defaults of keys that a config.json may omit.
  int64_t max_position_embeddings;
  double rms_norm_eps = 1e-6;
  double rope_theta = 1e4;
  bool tie_word_embeddings = false;
  int64_t head_dim = 0;  // 0: hidden_size / num_attention_heads
  // The default of num_key_value_heads. true: num_attention_heads. false: the class has another default, so
  // the key is required. null means num_attention_heads in all families.
  bool kv_heads_default_to_heads = false;

  // The features of all layers. A query_scale above 0 is the default of query_pre_attn_scalar; at 0 the key
  // is not read.
  LayerFeatures layer;
  const char* activation_key = "hidden_act";  // its default is layer.activation
  bool reads_attention_bias = false;          // attention_bias sets layer.qkv_bias and layer.output_bias
  bool reads_mlp_bias = false;                // mlp_bias sets layer.mlp_bias
  // If the keys of soft-capping are absent, the class caps logits. Capping is refused in all families.
  bool caps_logits_by_default = false;
  SlidingWindows windows;
  Experts experts;

  bool partial_rotary = false;     // reads partial_rotary_factor
  bool yarn_is_longrope = false;   // rope types "su" and "yarn" mean longrope
  int64_t original_positions = 0;  // default of original_max_position_embeddings, if the class has one
  // Default of rope_local_base_freq. Above 0: layers with a sliding window have a rotary embedding of their
  // own (LayerRope::kLocal), and rope_parameters may have one object for each type of layer.
  double local_rope_theta = 0;

  // Reads keys that no field above describes. slides: for each layer, whether it has a sliding window.
  void (*read)(const ConfigKeys& keys, const std::vector<bool>& slides, ModelConfig& config) = nullptr;
  // Sets keys of a written config.json that no field above describes, or that need another value.
  void (*write)(const ModelConfig& config, Json& json) = nullptr;
};

// One line a family. Messages list the families in this order.
#define BOUGH_FAMILIES(X) \
  X(qwen3)                \
  X(qwen2)                \
  X(llama)                \
  X(mistral)              \
  X(gemma2)               \
  X(gemma3)               \
  X(smollm3)              \
  X(phi3)                 \
  X(olmo2)                \
  X(mixtral)              \
  X(qwen3_moe)            \
  X(olmoe)

namespace families {
#define BOUGH_DECLARE_FAMILY(name) extern const Family name;
BOUGH_FAMILIES(BOUGH_DECLARE_FAMILY)
#undef BOUGH_DECLARE_FAMILY
}  // namespace families

std::span<const Family* const> all_families();

// Returns the family of a model_type. Throws UserError if it is unknown; the message lists the names.
const Family& family_named(const std::string& model_type);

// Joins a name of every family, for example &Family::class_name: "a, b or c" with the default separators.
std::string family_names(const char* Family::*name, const char* separator = ", ",
                         const char* last_separator = " or ");

}  // namespace bough

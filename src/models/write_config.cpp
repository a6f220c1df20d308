// Writes the config.json of a new model. config.cpp reads the same keys, by the same fields of the family.
#include <cmath>

#include "models/config.h"

namespace bough {

namespace {

void write_layer(const ModelConfig& config, Json& json) {
  const Family& family = *config.family;
  json[family.activation_key] = activation_name(config.activation);
  if (family.reads_attention_bias) json["attention_bias"] = config.output_bias;
  if (family.reads_mlp_bias) json["mlp_bias"] = config.mlp_bias;
  if (family.layer.query_scale > 0) {
    json["query_pre_attn_scalar"] = config.query_scale;
    if (config.query_scale == std::floor(config.query_scale))
      json["query_pre_attn_scalar"] = static_cast<int64_t>(config.query_scale);
  }
}

void write_experts(const ModelConfig& config, Json& json) {
  const Experts& experts = config.family->experts;
  if (!experts.any()) return;
  json[experts.count_key] = config.num_experts;
  json["num_experts_per_tok"] = config.experts_per_token;
  json[experts.size_key] = config.expert_intermediate_size;
  if (!experts.always_renormalises) json["norm_topk_prob"] = config.renormalises_experts;
  json["output_router_logits"] = false;
  json["router_aux_loss_coef"] = experts.aux_loss_coef;
}

// A new model has no sliding windows, unless its family requires them.
void write_windows(const ModelConfig& config, Json& json) {
  const SlidingWindows& windows = config.family->windows;
  if (!windows.any()) return;
  json["sliding_window"] = nullptr;
  if (windows.opt_in) json["use_sliding_window"] = false;
  if (!windows.in_every_layer)
    json["layer_types"] = std::vector<std::string>(static_cast<size_t>(config.num_layers), "full_attention");
}

void write_ropes(const ModelConfig& config, Json& json) {
  const Family& family = *config.family;
  Json& ropes = json["rope_parameters"];
  ropes = write_rope(config.rope);
  if (family.partial_rotary)
    ropes["partial_rotary_factor"] =
        static_cast<double>(config.turned_elements()) / static_cast<double>(config.head_dim);
  if (family.original_positions > 0)
    json["original_max_position_embeddings"] =
        config.rope.original_positions ? config.rope.original_positions : config.max_position_embeddings;
  if (family.local_rope_theta > 0)
    ropes = {{"full_attention", ropes}, {"sliding_attention", write_rope(config.local_rope)}};
}

}  // namespace

Json write_model_config(const ModelConfig& config) {
  Json json = {
      {"architectures", Json::array({config.family->class_name})},
      {"model_type", config.family->model_type},
      {"dtype", config.torch_dtype},
      {"vocab_size", config.vocab_size},
      {"hidden_size", config.hidden_size},
      {"intermediate_size", config.intermediate_size},
      {"num_hidden_layers", config.num_layers},
      {"num_attention_heads", config.num_heads},
      {"num_key_value_heads", config.num_kv_heads},
      {"head_dim", config.head_dim},
      {"max_position_embeddings", config.max_position_embeddings},
      {"rms_norm_eps", config.rms_norm_eps},
      {"tie_word_embeddings", config.tie_word_embeddings},
      {"attention_dropout", 0.0},
      {"initializer_range", 0.02},
      {"use_cache", true},
      {"bos_token_id", nullptr},
      {"eos_token_id", nullptr},
      {"pad_token_id", nullptr},
  };
  write_layer(config, json);
  write_experts(config, json);
  write_windows(config, json);
  write_ropes(config, json);
  if (config.family->write) config.family->write(config, json);
  return json;
}

}  // namespace bough

// Gemma 2 and Gemma 3 for text (transformers Gemma2ForCausalLM, Gemma3ForCausalLM): norms by 1 + weight
// before and after each sublayer, GeLU by tanh, scaled embeddings, sliding windows in many layers. Gemma 3
// adds an RMSNorm of each head of q and k. Its layers with a window have a rotary embedding of their own.
#include <algorithm>
#include <limits>

#include "models/config.h"
#include "models/config_keys.h"
#include "models/family.h"

namespace bough::families {

namespace {

constexpr LayerFeatures layer_features(bool qk_norm) {
  return {.norm_weight_offset = 1,
          .post_norms = true,
          .qk_norm = qk_norm,
          .query_scale = 256,
          .activation = GateActivation::kGeluTanh,
          .scale_embedding = true};
}

void write_gemma(const ModelConfig& config, bool (*slides)(const ModelConfig& config, int64_t layer),
                 Json& json) {
  Json types = Json::array();
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    types.push_back(slides(config, layer) ? "sliding_attention" : "full_attention");
  json["layer_types"] = types;
  json["sliding_window"] = std::min(config.max_exact_length, config.max_position_embeddings);
  json["attn_logit_softcapping"] = nullptr;
  json["final_logit_softcapping"] = nullptr;
}

void write_gemma2(const ModelConfig& config, Json& json) {
  const auto slides = [](const ModelConfig& of, int64_t layer) {
    return of.max_exact_length < std::numeric_limits<int64_t>::max() && layer % 2 == 0;
  };
  write_gemma(config, slides, json);
  json["use_bidirectional_attention"] = nullptr;
}

void write_gemma3(const ModelConfig& config, Json& json) {
  const auto slides = [](const ModelConfig& of, int64_t layer) {
    return of.layer_rope(layer) == LayerRope::kLocal;
  };
  write_gemma(config, slides, json);
  json["use_bidirectional_attention"] = false;
}

}  // namespace

const Family gemma2 = {
    .class_name = "Gemma2ForCausalLM",
    .model_type = "gemma2",
    .name = "Gemma 2",
    .max_position_embeddings = 8192,
    .tie_word_embeddings = true,
    .head_dim = 256,
    .layer = layer_features(/*qk_norm=*/false),
    .activation_key = "hidden_activation",
    .reads_attention_bias = true,
    .caps_logits_by_default = true,
    .windows = {.default_size = 4096,
                .required = true,
                .in_layer = [](const ConfigKeys&, int64_t layer) { return layer % 2 == 0; }},
    .write = write_gemma2};

const Family gemma3 = {
    .class_name = "Gemma3ForCausalLM",
    .model_type = "gemma3_text",
    .name = "Gemma 3",
    .max_position_embeddings = 131072,
    .rope_theta = 1e6,
    .tie_word_embeddings = true,
    .head_dim = 256,
    .layer = layer_features(/*qk_norm=*/true),
    .activation_key = "hidden_activation",
    .reads_attention_bias = true,
    .windows = {.default_size = 4096,
                .required = true,
                .in_layer =
                    [](const ConfigKeys& keys, int64_t layer) {
                      return (layer + 1) % keys.integer_or("sliding_window_pattern", kMaxLayers, 6) != 0;
                    }},
    .local_rope_theta = 1e4,
    .write = write_gemma3};

}  // namespace bough::families

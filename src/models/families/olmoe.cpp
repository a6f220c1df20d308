// OLMoE (transformers OlmoeForCausalLM): RMSNorm of q and k over all heads, a limit for the elements of q, k
// and v (clip_qkv), and a mixture of experts in every layer.
#include "models/config.h"
#include "models/config_keys.h"
#include "models/family.h"

namespace bough::families {

namespace {

void read_clip(const ConfigKeys& keys, const std::vector<bool>&, ModelConfig& config) {
  if (keys.has("clip_qkv")) config.clip_qkv = keys.positive("clip_qkv", 1e9);
  // The class applies a norm of hidden_size elements to q.
  if (config.query_width() != config.hidden_size)
    keys.fail("head_dim", str(config.head_dim),
              str("hidden_size / num_attention_heads, ", config.hidden_size, " / ", config.num_heads));
}

void write_clip(const ModelConfig& config, Json& json) {
  json["clip_qkv"] = config.clip_qkv > 0 ? Json(config.clip_qkv) : Json();
}

}  // namespace

const Family olmoe = {.class_name = "OlmoeForCausalLM",
                      .model_type = "olmoe",
                      .name = "OLMoE",
                      .max_position_embeddings = 4096,
                      .rms_norm_eps = 1e-5,
                      .kv_heads_default_to_heads = true,
                      .layer = {.qk_norm = true, .qk_norm_over_width = true},
                      .reads_attention_bias = true,
                      .experts = {.count_key = "num_experts", .aux_loss_coef = 0.01},
                      .read = read_clip,
                      .write = write_clip};

}  // namespace bough::families

// Phi-3 and Phi-4-mini (transformers Phi3ForCausalLM): fused qkv and gate-up weights, rotary embedding of a
// part of each head, longrope. If the config has a sliding window, all layers have it.
#include "models/family.h"

namespace bough::families {

const Family phi3 = {.class_name = "Phi3ForCausalLM",
                     .model_type = "phi3",
                     .name = "Phi-3",
                     .max_position_embeddings = 4096,
                     .rms_norm_eps = 1e-5,
                     .kv_heads_default_to_heads = true,
                     .layer = {.fused_projections = true},
                     .windows = {.in_every_layer = true},
                     .partial_rotary = true,
                     .yarn_is_longrope = true,
                     .original_positions = 4096,
                     .write = [](const ModelConfig&, Json& json) {
                       json["resid_pdrop"] = 0.0;
                       json["embd_pdrop"] = 0.0;
                     }};

}  // namespace bough::families

// Llama 2 and 3, SmolLM2 (transformers LlamaForCausalLM).
#include "models/family.h"

namespace bough::families {

const Family llama = {.class_name = "LlamaForCausalLM",
                      .model_type = "llama",
                      .name = "Llama",
                      .max_position_embeddings = 2048,
                      .kv_heads_default_to_heads = true,
                      .reads_attention_bias = true,
                      .reads_mlp_bias = true,
                      .write = [](const ModelConfig&, Json& json) { json["pretraining_tp"] = 1; }};

}  // namespace bough::families

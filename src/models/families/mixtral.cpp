// Mixtral (transformers MixtralForCausalLM): Mistral's attention, and a mixture of experts in every layer.
// The weights of a token's experts sum to 1. In checkpoints, w1 is gate, w3 is up and w2 is down.
#include "models/config.h"
#include "models/family.h"

namespace bough::families {

namespace {

void write_jitter(const ModelConfig&, Json& json) {
  json["router_jitter_noise"] = 0.0;
}

}  // namespace

const Family mixtral = {.class_name = "MixtralForCausalLM",
                        .model_type = "mixtral",
                        .name = "Mixtral",
                        .max_position_embeddings = 131072,
                        .rms_norm_eps = 1e-5,
                        .rope_theta = 1e6,
                        .windows = {.in_every_layer = true},
                        .experts = {.count_key = "num_local_experts",
                                    .always_renormalises = true,
                                    .block = "block_sparse_moe",
                                    .gate = "w1",
                                    .up = "w3",
                                    .down = "w2"},
                        .write = write_jitter};

}  // namespace bough::families

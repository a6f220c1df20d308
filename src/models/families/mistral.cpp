// Mistral (transformers MistralForCausalLM): Llama's layers. All layers have a sliding window, unless the key
// sliding_window is null.
#include "models/family.h"

namespace bough::families {

const Family mistral = {.class_name = "MistralForCausalLM",
                        .model_type = "mistral",
                        .name = "Mistral",
                        .max_position_embeddings = 131072,
                        .windows = {.default_size = 4096, .in_every_layer = true}};

}  // namespace bough::families

// OLMo 2 (transformers Olmo2ForCausalLM): RMSNorm of each sublayer's output, not of its input. RMSNorm of q
// and k over all heads.
#include "models/family.h"

namespace bough::families {

const Family olmo2 = {
    .class_name = "Olmo2ForCausalLM",
    .model_type = "olmo2",
    .name = "OLMo 2",
    .max_position_embeddings = 2048,
    .rms_norm_eps = 1e-5,
    .kv_heads_default_to_heads = true,
    .layer = {.pre_norms = false, .post_norms = true, .qk_norm = true, .qk_norm_over_width = true},
    .reads_attention_bias = true};

}  // namespace bough::families

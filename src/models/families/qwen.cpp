// Qwen3 and Qwen2.5 (transformers Qwen3ForCausalLM, Qwen2ForCausalLM). Qwen3 has an RMSNorm of each head of q
// and k. Qwen2.5 has biases of q, k and v. If use_sliding_window is true, the layers from max_window_layers
// on have a sliding window.
#include "models/config.h"
#include "models/config_keys.h"
#include "models/family.h"

namespace bough::families {

namespace {

constexpr SlidingWindows kWindows = {
    .default_size = 4096, .opt_in = true, .in_layer = [](const ConfigKeys& keys, int64_t layer) {
      return layer >= keys.integer_or("max_window_layers", kMaxLayers, 28);
    }};

void write(const ModelConfig& config, Json& json) {
  json["max_window_layers"] = config.num_layers;
}

}  // namespace

const Family qwen3 = {.class_name = "Qwen3ForCausalLM",
                      .model_type = "qwen3",
                      .name = "Qwen3",
                      .max_position_embeddings = 32768,
                      .head_dim = 128,
                      .layer = {.qk_norm = true},
                      .reads_attention_bias = true,
                      .windows = kWindows,
                      .write = write};

const Family qwen2 = {.class_name = "Qwen2ForCausalLM",
                      .model_type = "qwen2",
                      .name = "Qwen2",
                      .max_position_embeddings = 32768,
                      .layer = {.qkv_bias = true},
                      .windows = kWindows,
                      .write = write};

}  // namespace bough::families

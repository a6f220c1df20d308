// Qwen3-MoE (transformers Qwen3MoeForCausalLM): Qwen3's attention, and mixtures of experts in all layers
// except those that mlp_only_layers and decoder_sparse_step name.
#include <algorithm>

#include "models/config.h"
#include "models/config_keys.h"
#include "models/family.h"

namespace bough::families {

namespace {

// Layer i is sparse if it is not in mlp_only_layers and i + 1 is a multiple of decoder_sparse_step.
void read_dense_layers(const ConfigKeys& keys, const std::vector<bool>&, ModelConfig& config) {
  const int64_t step = keys.integer_or("decoder_sparse_step", kMaxLayers, 1);
  std::vector<uint8_t> is_dense(static_cast<size_t>(config.num_layers));
  for (size_t layer = 0; layer < is_dense.size(); ++layer)
    is_dense[layer] = static_cast<int64_t>(layer + 1) % step != 0;
  if (keys.has("mlp_only_layers")) {
    const Json& layers = keys.get("mlp_only_layers");
    const std::string expected = str("a list of layers from 0 to ", config.num_layers - 1);
    if (!layers.is_array()) keys.fail("mlp_only_layers", ConfigKeys::shown(layers), expected);
    for (const Json& layer : layers) {
      const int64_t index = layer.is_number_integer() ? layer.get<int64_t>() : -1;
      if (index < 0 || index >= config.num_layers)
        keys.fail("mlp_only_layers", ConfigKeys::shown(layers), expected);
      is_dense[static_cast<size_t>(index)] = 1;
    }
  }
  if (std::count(is_dense.begin(), is_dense.end(), uint8_t{1}) > 0) config.dense_layers = is_dense;
}

void write_dense_layers(const ModelConfig& config, Json& json) {
  json["decoder_sparse_step"] = 1;
  json["mlp_only_layers"] = Json::array();
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    if (!config.is_sparse(layer)) json["mlp_only_layers"].push_back(layer);
}

}  // namespace

const Family qwen3_moe = {.class_name = "Qwen3MoeForCausalLM",
                          .model_type = "qwen3_moe",
                          .name = "Qwen3-MoE",
                          .max_position_embeddings = 32768,
                          .layer = {.qk_norm = true},
                          .reads_attention_bias = true,
                          .windows = {.default_size = 4096, .opt_in = true, .in_every_layer = true},
                          .experts = {.count_key = "num_local_experts", .size_key = "moe_intermediate_size"},
                          .read = read_dense_layers,
                          .write = write_dense_layers};

}  // namespace bough::families

// SmolLM3 (transformers SmolLM3ForCausalLM): Llama's layers. Some have no rotary embedding.
#include "models/config.h"
#include "models/config_keys.h"
#include "models/family.h"

namespace bough::families {

namespace {

constexpr int64_t kInterval = 4;  // default: every fourth layer has no rotary embedding

bool has_rope(const ConfigKeys& keys, int64_t layer) {
  const Json& list = keys.get("no_rope_layers");
  if (list.is_null())
    return (layer + 1) % keys.integer_or("no_rope_layer_interval", kMaxLayers, kInterval) != 0;
  if (!list.is_array() || int64_t(list.size()) <= layer)
    keys.fail("no_rope_layers", ConfigKeys::shown(list),
              "a list with a number for each layer, 0 for a layer without positions");
  return list[static_cast<size_t>(layer)] != 0;
}

void read_layers_without_rope(const ConfigKeys& keys, const std::vector<bool>& /*slides*/,
                              ModelConfig& config) {
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    config.layer_ropes.push_back(has_rope(keys, layer) ? LayerRope::kGlobal : LayerRope::kNone);
}

void write_layers_without_rope(const ModelConfig& config, Json& json) {
  Json turns = Json::array();
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    turns.push_back(config.layer_rope(layer) == LayerRope::kNone ? 0 : 1);
  json["no_rope_layer_interval"] = kInterval;
  json["no_rope_layers"] = turns;
}

}  // namespace

const Family smollm3 = {
    .class_name = "SmolLM3ForCausalLM",
    .model_type = "smollm3",
    .name = "SmolLM3",
    .max_position_embeddings = 32768,
    .rope_theta = 2e6,
    .tie_word_embeddings = true,
    .reads_attention_bias = true,
    .reads_mlp_bias = true,
    // If use_sliding_window is true, the layers without a rotary embedding have a window.
    .windows = {.opt_in = true,
                .in_layer = [](const ConfigKeys& keys, int64_t layer) { return !has_rope(keys, layer); }},
    .read = read_layers_without_rope,
    .write = write_layers_without_rope};

}  // namespace bough::families

// SmolLM3 (transformers SmolLM3ForCausalLM): Llama's layers. Some have no rotary embedding.
#include "models/config.h"
#include "models/config_keys.h"
#include "models/family.h"

namespace bough::families {

namespace {

constexpr int64_t kInterval = 4;  // default: every fourth layer has no rotary embedding

void read_layers_without_rope(const ConfigKeys& keys, const std::vector<bool>& /*slides*/,
                              ModelConfig& config) {
  const int64_t interval = keys.integer_or("no_rope_layer_interval", kMaxLayers, kInterval);
  const bool listed = keys.has("no_rope_layers");
  const Json& list = keys.get("no_rope_layers");
  if (listed && (!list.is_array() || int64_t(list.size()) < config.num_layers))
    keys.fail("no_rope_layers", ConfigKeys::shown(list),
              str("a list of ", config.num_layers, " numbers, 0 for a layer without positions"));
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const bool turns = listed ? list[static_cast<size_t>(layer)] != 0 : (layer + 1) % interval != 0;
    config.layer_ropes.push_back(turns ? LayerRope::kGlobal : LayerRope::kNone);
  }
}

void write_layers_without_rope(const ModelConfig& config, Json& json) {
  Json turns = Json::array();
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    turns.push_back(config.layer_rope(layer) == LayerRope::kNone ? 0 : 1);
  json["no_rope_layer_interval"] = kInterval;
  json["no_rope_layers"] = turns;
}

}  // namespace

const Family smollm3 = {.class_name = "SmolLM3ForCausalLM",
                        .model_type = "smollm3",
                        .name = "SmolLM3",
                        .max_position_embeddings = 32768,
                        .rope_theta = 2e6,
                        .tie_word_embeddings = true,
                        .reads_attention_bias = true,
                        .reads_mlp_bias = true,
                        .windows = {.opt_in = true},
                        .read = read_layers_without_rope,
                        .write = write_layers_without_rope};

}  // namespace bough::families

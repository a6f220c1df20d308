#include "models/config.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "models/config_keys.h"

namespace bough {

namespace {

// Bounds far above any decoder of this kind. Beyond them a file is damaged. Within them, products of two
// sizes fit 64 bits.
constexpr int64_t kMaxWidth = int64_t{1} << 24;
constexpr int64_t kMaxPositions = int64_t{1} << 31;
constexpr int64_t kMaxExperts = 1 << 16;
constexpr int64_t kMaxVocabulary = std::numeric_limits<int32_t>::max();  // tokens are int32

// Finds the family by `architectures`, which names the class. A config without the key (a base class's
// config) is found by `model_type`.
const Family& read_family(const ConfigKeys& keys) {
  const std::string model_type = keys.text_or("model_type", "");
  const Family* found = nullptr;
  if (keys.has("architectures")) {
    const Json& names = keys.get("architectures");
    if (!names.is_array() || names.size() != 1 || !names[0].is_string())
      keys.fail("architectures", ConfigKeys::shown(names),
                str("a list of one name: ", family_names(&Family::class_name)));
    for (const Family* family : all_families())
      if (names[0] == family->class_name) found = family;
    if (!found)
      keys.fail("architectures", ConfigKeys::shown(names[0]),
                str(family_names(&Family::class_name), ": no other architecture is supported"));
    if (!model_type.empty() && model_type != found->model_type)
      keys.fail("model_type", quoted(model_type),
                str("'", found->model_type, "', which ", found->class_name, " has"));
    return *found;
  }
  for (const Family* family : all_families())
    if (model_type == family->model_type) found = family;
  if (!found)
    keys.fail("architectures", str("nothing, and model_type ", quoted(model_type)),
              family_names(&Family::class_name));
  return *found;
}

void read_sizes(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  config.vocab_size = keys.integer("vocab_size", kMaxVocabulary);
  config.hidden_size = keys.integer("hidden_size", kMaxWidth);
  config.intermediate_size = keys.integer("intermediate_size", kMaxWidth);
  config.num_layers = keys.integer("num_hidden_layers", kMaxLayers);
  config.num_heads = keys.integer("num_attention_heads", kMaxWidth);
  config.max_position_embeddings =
      keys.integer_or("max_position_embeddings", kMaxPositions, family.max_position_embeddings);
  if (!keys.object().contains("num_key_value_heads") && !family.kv_heads_default_to_heads)
    keys.fail("num_key_value_heads", "nothing",
              str("an integer that divides the ", config.num_heads, " query heads"));
  config.num_kv_heads = keys.integer_or("num_key_value_heads", kMaxWidth, config.num_heads);
  if (config.num_heads % config.num_kv_heads != 0)
    keys.fail("num_key_value_heads", str(config.num_kv_heads),
              str("a divisor of num_attention_heads, ", config.num_heads));
  if (!keys.has("head_dim") && family.head_dim == 0 && config.hidden_size % config.num_heads != 0)
    keys.fail("num_attention_heads", str(config.num_heads),
              str("a divisor of hidden_size, ", config.hidden_size, ", where head_dim is not given"));
  config.head_dim = keys.integer_or(
      "head_dim", 1 << 16,
      family.head_dim ? family.head_dim : std::max<int64_t>(1, config.hidden_size / config.num_heads));
  if (config.head_dim % 2 != 0)
    keys.fail("head_dim", str(config.head_dim), "an even number: rotary positions turn pairs");
  if (config.num_heads > kMaxWidth / config.head_dim)
    keys.fail("num_attention_heads", str(config.num_heads),
              str("at most ", kMaxWidth, " / head_dim ", config.head_dim));
}

// Sets the features of the layers: those of the family, and those that keys of the config choose.
void read_layer(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  static_cast<LayerFeatures&>(config) = family.layer;
  if (family.reads_attention_bias && keys.flag_or("attention_bias", false))
    config.qkv_bias = config.output_bias = true;
  config.mlp_bias = keys.flag_or("mlp_bias", false);
  if (config.mlp_bias && !family.reads_mlp_bias)
    keys.refuse("mlp_bias", "a bias in this family's feed-forward layers");
  const std::string activation = keys.text_or(family.activation_key, activation_name(config.activation));
  if (activation != "silu" && activation != "gelu_pytorch_tanh")
    keys.refuse(family.activation_key, str("activation ", quoted(activation)));
  config.activation = activation == "silu" ? GateActivation::kSilu : GateActivation::kGeluTanh;
  if (family.layer.query_scale > 0)
    config.query_scale = keys.positive_or("query_pre_attn_scalar", 1e9, family.layer.query_scale);
}

// Keys of routers that choose or weigh experts in another way, and of experts that every token uses. No class
// that is read has them. A file with one of them belongs to another class.
void refuse_other_routers(const ConfigKeys& keys) {
  struct Other {
    const char* key;
    Json harmless;
    const char* what;
  };
  const Other others[] = {
      {"n_shared_experts", 0, "an expert that every token uses"},
      {"num_shared_experts", 0, "an expert that every token uses"},
      {"shared_expert_intermediate_size", 0, "an expert that every token uses"},
      {"n_group", 1, "choosing experts by groups"},
      {"topk_group", 1, "choosing experts by groups"},
      {"topk_method", "greedy", "another choice of experts than the largest logits"},
      {"use_routing_bias", false, "a correction bias of the router"},
      {"routed_scaling_factor", 1, "scaling the experts' output"},
      {"router_jitter_noise", 0, "noise on the router's input in training"},
      {"scoring_func", "softmax", "another function of the router's logits than softmax"}};
  for (const auto& [key, harmless, what] : others)
    if (keys.has(key) && keys.get(key) != harmless)
      keys.refuse(key, str(what, " (", ConfigKeys::shown(keys.get(key)), ")"));
}

void read_experts(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  if (!family.experts.any()) return;
  refuse_other_routers(keys);
  const char* count_key = keys.has("num_experts") ? "num_experts" : "num_local_experts";
  if (keys.has("num_experts") && keys.has("num_local_experts") &&
      keys.get("num_experts") != keys.get("num_local_experts"))
    keys.fail("num_local_experts", ConfigKeys::shown(keys.get("num_local_experts")),
              str("the number in num_experts, ", ConfigKeys::shown(keys.get("num_experts")), ", or one key"));
  if (!keys.has(count_key)) count_key = family.experts.count_key;
  config.num_experts = keys.integer(count_key, kMaxExperts);
  config.experts_per_token = keys.integer("num_experts_per_tok", kMaxExperts);
  if (config.experts_per_token > config.num_experts)
    keys.fail("num_experts_per_tok", str(config.experts_per_token),
              str("at most ", count_key, ", ", config.num_experts));
  config.expert_intermediate_size = keys.integer(family.experts.size_key, kMaxWidth);
  config.renormalises_experts = family.experts.always_renormalises || keys.flag_or("norm_topk_prob", false);
}

void refuse_what_changes_the_result(const ConfigKeys& keys, const Family& family) {
  if (keys.has("quantization_config")) keys.refuse("quantization_config", "a quantised model");
  for (const char* key : {"attention_dropout", "resid_pdrop", "embd_pdrop"})
    if (keys.has(key) && keys.get(key) != 0)
      keys.refuse(key, str("dropout (", ConfigKeys::shown(keys.get(key)), ")"));
  if (keys.flag_or("use_bidirectional_attention", false))
    keys.refuse("use_bidirectional_attention", "attention to later tokens");
  if (!keys.flag_or("is_causal", true)) keys.refuse("is_causal", "attention to later tokens (false)");
  if (keys.flag_or("is_encoder_decoder", false)) keys.refuse("is_encoder_decoder", "an encoder");
  if (keys.has("per_layer_config") && !keys.get("per_layer_config").empty())
    keys.refuse("per_layer_config", "a layer with settings of its own");
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping"}) {
    if (family.caps_logits_by_default && !keys.object().contains(key))
      keys.refuse(key, str("soft-capping of logits, which ", family.name, " does where the key is absent,"));
    if (keys.has(key))
      keys.refuse(key, str("soft-capping of logits (", ConfigKeys::shown(keys.get(key)), ")"));
  }
}

// Returns for each layer whether it has a sliding window. If one has, sets max_exact_length to the window's
// size: in a sequence up to this length, every token sees all tokens before it.
std::vector<bool> read_sliding_layers(const ConfigKeys& keys, const Family& family, ModelConfig& config) {
  const SlidingWindows& windows = family.windows;
  // A class without the key has its windows whatever the key says.
  const bool uses = !windows.opt_in || keys.flag_or("use_sliding_window", false);
  const bool uses_default = windows.default_size > 0 && !keys.object().contains("sliding_window");
  const bool has_window = uses && (keys.has("sliding_window") || uses_default);
  std::vector<bool> slides(static_cast<size_t>(config.num_layers));
  if (keys.has("layer_types")) {
    const Json& types = keys.get("layer_types");
    if (!types.is_array() || int64_t(types.size()) != config.num_layers)
      keys.fail("layer_types", ConfigKeys::shown(types),
                str("a list of ", config.num_layers, " names, one a layer"));
    for (size_t layer = 0; layer < types.size(); ++layer) {
      slides[layer] = types[layer] == "sliding_attention";
      if (slides[layer] ? !has_window : types[layer] != "full_attention")
        keys.refuse("layer_types", str("attention ", ConfigKeys::shown(types[layer]), " in layer ", layer,
                                       slides[layer] ? " without a window (sliding_window)" : ""));
    }
  } else if (windows.in_layer && (has_window || windows.required)) {
    for (int64_t layer = 0; layer < config.num_layers; ++layer)
      slides[static_cast<size_t>(layer)] = windows.in_layer(keys, layer);
  }
  if (has_window && windows.in_every_layer) slides.assign(slides.size(), true);
  if (std::find(slides.begin(), slides.end(), true) == slides.end()) return slides;
  const int64_t window = keys.object().contains("sliding_window")
                             ? keys.integer("sliding_window", kMaxPositions)
                             : windows.default_size;
  config.max_exact_length = window;
  config.beyond_exact_length = str("its sliding window (sliding_window ", window,
                                   "), beyond which tokens would see a part of the sequence");
  return slides;
}

// transformers before 5 writes rope_theta beside rope_scaling, which is null or describes the scaling of
// positions. From 5 on, rope_parameters holds both.
const char* rope_key(const ConfigKeys& keys) {
  for (const char* key : {"rope_scaling", "rope_parameters"})
    if (keys.has(key) && !keys.get(key).is_object())
      keys.fail(key, ConfigKeys::shown(keys.get(key)), "an object such as {\"rope_type\": \"default\"}");
  const bool has_scaling = keys.has("rope_scaling") && !keys.get("rope_scaling").empty();
  if (has_scaling && keys.has("rope_parameters") && keys.get("rope_parameters") != keys.get("rope_scaling"))
    keys.fail("rope_scaling", "another object than rope_parameters", "one of them");
  return has_scaling ? "rope_scaling" : "rope_parameters";
}

double read_partial_rotary(const ConfigKeys& keys, const ConfigKeys& rope, const Family& family) {
  const ConfigKeys& where = rope.has("partial_rotary_factor") ? rope : keys;
  const double part = where.positive_or("partial_rotary_factor", 1, 1);
  if (part != 1 && !family.partial_rotary)
    where.refuse("partial_rotary_factor", str("rotating a part of each head (", part, ") in this family"));
  return part;
}

void read_ropes(const ConfigKeys& keys, const Family& family, const std::vector<bool>& slides,
                ModelConfig& config) {
  static const Json empty = Json::object();
  const char* key = rope_key(keys);
  const Json& object = keys.has(key) ? keys.get(key) : empty;
  const auto keys_of = [&](const Json& json, const std::string& name) {
    return ConfigKeys(json, str(keys.where(), ", key '", key, "'", name));
  };
  const auto part_of = [&](const char* name) -> ConfigKeys {
    const Json& part = object.contains(name) && !object[name].is_null() ? object[name] : empty;
    if (!part.is_object()) keys_of(object, "").fail(name, ConfigKeys::shown(part), "an object");
    return keys_of(part, str(", key '", name, "'"));
  };
  const bool has_local = family.local_rope_theta > 0;
  const bool by_layer =
      has_local && (object.contains("full_attention") || object.contains("sliding_attention"));
  const ConfigKeys global = by_layer ? part_of("full_attention") : keys_of(object, "");
  const double part = read_partial_rotary(keys, global, family);
  const auto rotary_dim = static_cast<int64_t>(static_cast<double>(config.head_dim) * part);
  if (rotary_dim % 2 != 0 || rotary_dim == 0)
    keys.fail("partial_rotary_factor", str(part), "an even number of a head's elements");
  config.rotary_dim = rotary_dim == config.head_dim ? 0 : rotary_dim;
  RopeContext context{
      .default_theta = keys.positive_or("rope_theta", 1e30, family.rope_theta),
      .rotary_dim = rotary_dim,
      .max_positions = config.max_position_embeddings,
      .original_positions = keys.has("original_max_position_embeddings")
                                ? keys.integer("original_max_position_embeddings", kMaxPositions)
                                : family.original_positions,
      .yarn_is_longrope = family.yarn_is_longrope};
  config.rope = read_rope(global, context);
  if (config.rope.max_exact_length < config.max_exact_length) {
    config.max_exact_length = config.rope.max_exact_length;
    config.beyond_exact_length =
        str("the length up to which its rope scaling does not depend on a sequence's length (", key, ")");
  }
  if (has_local) {
    context.default_theta = keys.positive_or("rope_local_base_freq", 1e30, family.local_rope_theta);
    const ConfigKeys local = by_layer ? part_of("sliding_attention") : keys_of(empty, "");
    config.local_rope = read_rope(local, context);
    if (config.local_rope.type != RopeType::kDefault || local.has("partial_rotary_factor") ||
        config.rope.type == RopeType::kYarn)
      keys.refuse(key, str("this rope scaling in ", family.name));
    for (const bool slide : slides)
      config.layer_ropes.push_back(slide ? LayerRope::kLocal : LayerRope::kGlobal);
  }
}

}  // namespace

const char* activation_name(GateActivation activation) {
  return activation == GateActivation::kSilu ? "silu" : "gelu_pytorch_tanh";
}

int64_t ModelConfig::num_sparse_layers() const {
  if (!is_mixture()) return 0;
  return num_layers - std::count(dense_layers.begin(), dense_layers.end(), uint8_t{1});
}

int64_t ModelConfig::widest_feed_forward() const {
  const int64_t dense = num_dense_layers() > 0 ? intermediate_size : 0;
  return num_sparse_layers() > 0 ? std::max(dense, expert_elements()) : dense;
}

int64_t ModelConfig::num_parameters() const {
  const int64_t qkv = query_width() + 2 * key_width();
  int64_t layer = hidden_size * (qkv + query_width());
  layer += ((pre_norms ? 2 : 0) + (post_norms ? 2 : 0)) * hidden_size;
  if (qkv_bias) layer += qkv;
  if (output_bias) layer += hidden_size;
  if (mlp_bias) layer += 2 * intermediate_size + hidden_size;
  if (qk_norm) layer += qk_norm_over_width ? query_width() + key_width() : 2 * head_dim;
  const int64_t sparse = hidden_size * num_experts * (1 + 3 * expert_intermediate_size);
  const int64_t feed_forward =
      num_dense_layers() * 3 * hidden_size * intermediate_size + num_sparse_layers() * sparse;
  return num_layers * layer + feed_forward + hidden_size +
         vocab_size * hidden_size * (tie_word_embeddings ? 1 : 2);
}

ModelConfig parse_model_config(const Json& json, const std::string& where) {
  if (!json.is_object())
    throw UserError(str(where, ": got ", ConfigKeys::shown(json), "; expected an object, a model's config"));
  const ConfigKeys keys(json, where);
  const Family& family = read_family(keys);
  ModelConfig config;
  config.family = &family;
  read_sizes(keys, family, config);
  read_layer(keys, family, config);
  read_experts(keys, family, config);
  refuse_what_changes_the_result(keys, family);
  config.rms_norm_eps = keys.positive_or("rms_norm_eps", 1, family.rms_norm_eps);
  const std::vector<bool> slides = read_sliding_layers(keys, family, config);
  read_ropes(keys, family, slides, config);
  if (family.read) family.read(keys, slides, config);
  config.tie_word_embeddings = keys.flag_or("tie_word_embeddings", family.tie_word_embeddings);
  config.torch_dtype = keys.text_or("dtype", keys.text_or("torch_dtype", "float32").c_str());
  config.source = json;
  return config;
}

ModelConfig load_model_config(const std::filesystem::path& directory) {
  if (!std::filesystem::is_directory(directory))
    throw UserError(str(directory.string(), ": got ",
                        std::filesystem::exists(directory) ? "a file" : "nothing there",
                        "; expected a Hugging Face model directory (config.json, model.safetensors)"));
  const std::filesystem::path file = directory / "config.json";
  return parse_model_config(read_json(file), file.string());
}

}  // namespace bough

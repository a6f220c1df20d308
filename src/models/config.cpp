#include "models/config.h"

#include <array>
#include <cmath>
#include <limits>
#include <set>

#include "base/error.h"

namespace bough {

namespace {

// Bounds that no decoder of this kind comes near: beyond them a file is damaged, and products of two sizes
// still fit 64 bits.
constexpr int64_t kMaxWidth = int64_t{1} << 24;
constexpr int64_t kMaxLayers = 10'000;
constexpr int64_t kMaxPositions = int64_t{1} << 31;
constexpr int64_t kMaxVocabulary = std::numeric_limits<int32_t>::max();  // tokens are int32

struct KnownArchitecture {
  Architecture architecture;
  const char* class_name;  // what `architectures` says
  const char* model_type;
};
constexpr std::array<KnownArchitecture, 3> kKnown = {{{Architecture::kQwen3, "Qwen3ForCausalLM", "qwen3"},
                                                      {Architecture::kQwen2, "Qwen2ForCausalLM", "qwen2"},
                                                      {Architecture::kLlama, "LlamaForCausalLM", "llama"}}};
constexpr const char* kSupported = "Qwen3ForCausalLM, Qwen2ForCausalLM or LlamaForCausalLM";

std::string shown(const Json& value) {
  return value.is_null() ? "nothing" : quoted(dump_line(value));
}

// Keys of one JSON object, read with checks; null counts as absent, as transformers writes None.
class Keys {
 public:
  Keys(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  const Json& get(const char* key) const {
    static const Json null;
    const auto it = object_.find(key);
    return it == object_.end() ? null : *it;
  }
  bool has(const char* key) const { return !get(key).is_null(); }

  [[noreturn]] void fail(const std::string& key, const std::string& got, const std::string& expected) const {
    throw UserError(str(where_, ", key ", quoted(key), ": got ", got, "; expected ", expected));
  }
  // What would change the result and is not computed.
  [[noreturn]] void refuse(const std::string& key, const std::string& what) const {
    throw UserError(str(where_, ", key ", quoted(key), ": ", what,
                        " is not supported; use a model without it (a wrong result is never computed)"));
  }

  int64_t integer(const char* key, int64_t high, const int64_t* fallback = nullptr) const {
    if (!has(key) && fallback) return *fallback;
    const Json& value = get(key);
    const std::string expected = str("an integer from 1 to ", high);
    if (!value.is_number_integer()) fail(key, shown(value), expected);
    if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(high))
      fail(key, shown(value), expected);
    if (value.get<int64_t>() < 1 || value.get<int64_t>() > high) fail(key, shown(value), expected);
    return value.get<int64_t>();
  }
  int64_t integer_or(const char* key, int64_t high, int64_t fallback) const {
    return integer(key, high, &fallback);
  }

  double positive_or(const char* key, double high, double fallback) const {
    if (!has(key)) return fallback;
    const Json& value = get(key);
    const double number = value.is_number() ? value.get<double>() : -1;
    if (!(number > 0 && number <= high)) fail(key, shown(value), str("a number above 0, at most ", high));
    return number;
  }
  bool flag_or(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    if (!get(key).is_boolean()) fail(key, shown(get(key)), "true or false");
    return get(key).get<bool>();
  }
  std::string text_or(const char* key, const char* fallback) const {
    if (!has(key)) return fallback;
    if (!get(key).is_string()) fail(key, shown(get(key)), "a string");
    return get(key).get<std::string>();
  }
  const Json& object() const { return object_; }
  const std::string& where() const { return where_; }

 private:
  const Json& object_;
  std::string where_;
};

// By `architectures`, which names the class; a config without it (a base class's) by `model_type`.
const KnownArchitecture& read_architecture(const Keys& keys) {
  const std::string model_type = keys.text_or("model_type", "");
  const KnownArchitecture* found = nullptr;
  if (keys.has("architectures")) {
    const Json& names = keys.get("architectures");
    if (!names.is_array() || names.size() != 1 || !names[0].is_string())
      keys.fail("architectures", shown(names), str("a list of one name: ", kSupported));
    for (const KnownArchitecture& known : kKnown)
      if (names[0] == known.class_name) found = &known;
    if (!found)
      keys.fail("architectures", shown(names[0]), str(kSupported, ": no other architecture is supported"));
    if (!model_type.empty() && model_type != found->model_type)
      keys.fail("model_type", quoted(model_type),
                str("'", found->model_type, "', which ", found->class_name, " has"));
    return *found;
  }
  for (const KnownArchitecture& known : kKnown)
    if (model_type == known.model_type) found = &known;
  if (!found) keys.fail("architectures", str("nothing, and model_type ", quoted(model_type)), kSupported);
  return *found;
}

// transformers before 5 writes rope_theta beside rope_scaling (null, or what stretches the positions); from 5
// on rope_parameters holds both.
double read_rope_theta(const Keys& keys) {
  double theta = keys.positive_or("rope_theta", 1e30, 1e4);
  if (keys.has("partial_rotary_factor") && keys.get("partial_rotary_factor") != 1)
    keys.refuse("partial_rotary_factor",
                str("rotating a part of each head (", shown(keys.get("partial_rotary_factor")), ")"));
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!keys.has(key)) continue;
    const Json& object = keys.get(key);
    if (!object.is_object()) keys.fail(key, shown(object), "an object such as {\"rope_type\": \"default\"}");
    const Keys rope(object, str(keys.where(), ", key '", key, "'"));
    for (const char* type_key : {"rope_type", "type"}) {
      const std::string type = rope.text_or(type_key, "default");
      if (type != "default") keys.refuse(key, str("rope scaling of type ", quoted(type)));
    }
    if (rope.has("partial_rotary_factor") && rope.get("partial_rotary_factor") != 1)
      rope.refuse("partial_rotary_factor", "rotating a part of each head");
    static const std::set<std::string> known = {"rope_type", "type", "rope_theta", "partial_rotary_factor",
                                                "original_max_position_embeddings"};
    for (const auto& [name, value] : object.items())
      if (!known.contains(name) && !value.is_null())
        rope.refuse(name, str("this rope parameter (", shown(value), ")"));
    theta = rope.positive_or("rope_theta", 1e30, theta);
  }
  return theta;
}

void refuse_sliding_windows(const Keys& keys, int64_t num_layers) {
  if (keys.flag_or("use_sliding_window", false))
    keys.refuse("use_sliding_window", "sliding-window attention");
  if (!keys.has("layer_types")) return;
  const Json& types = keys.get("layer_types");
  if (!types.is_array() || int64_t(types.size()) != num_layers)
    keys.fail("layer_types", shown(types), str("a list of ", num_layers, " names, one a layer"));
  for (size_t layer = 0; layer < types.size(); ++layer)
    if (types[layer] != "full_attention")
      keys.refuse("layer_types", str("attention ", shown(types[layer]), " in layer ", layer));
}

void refuse_what_changes_the_result(const Keys& keys, const ModelConfig& config) {
  const std::string activation = keys.text_or("hidden_act", "silu");
  if (activation != "silu") keys.refuse("hidden_act", str("activation ", quoted(activation)));
  if (keys.has("quantization_config")) keys.refuse("quantization_config", "a quantised model");
  if (keys.flag_or("mlp_bias", false)) keys.refuse("mlp_bias", "a bias in the feed-forward layers");
  if (config.architecture == Architecture::kQwen3 && keys.flag_or("attention_bias", false))
    keys.refuse("attention_bias", "a bias in Qwen3's attention");
  if (keys.has("attention_dropout") && keys.get("attention_dropout") != 0)
    keys.refuse("attention_dropout", str("attention dropout (", shown(keys.get("attention_dropout")), ")"));
  refuse_sliding_windows(keys, config.num_layers);
}

void read_sizes(const Keys& keys, ModelConfig& config) {
  config.vocab_size = keys.integer("vocab_size", kMaxVocabulary);
  config.hidden_size = keys.integer("hidden_size", kMaxWidth);
  config.intermediate_size = keys.integer("intermediate_size", kMaxWidth);
  config.num_layers = keys.integer("num_hidden_layers", kMaxLayers);
  config.num_heads = keys.integer("num_attention_heads", kMaxWidth);
  config.max_position_embeddings = keys.integer_or(
      "max_position_embeddings", kMaxPositions, config.architecture == Architecture::kLlama ? 2048 : 32768);
  // Absent, Qwen's classes take 32 and Llama's the query heads; null is the query heads for all.
  if (!keys.object().contains("num_key_value_heads") && config.architecture != Architecture::kLlama)
    keys.fail("num_key_value_heads", "nothing",
              str("an integer that divides the ", config.num_heads, " query heads"));
  config.num_kv_heads = keys.integer_or("num_key_value_heads", kMaxWidth, config.num_heads);
  if (config.num_heads % config.num_kv_heads != 0)
    keys.fail("num_key_value_heads", str(config.num_kv_heads),
              str("a divisor of num_attention_heads, ", config.num_heads));
  // transformers' Qwen3 has a default of its own; the others divide the width.
  if (!keys.has("head_dim") && config.architecture != Architecture::kQwen3 &&
      config.hidden_size % config.num_heads != 0)
    keys.fail("num_attention_heads", str(config.num_heads),
              str("a divisor of hidden_size, ", config.hidden_size, ", where head_dim is not given"));
  config.head_dim = keys.integer_or("head_dim", 1 << 16,
                                    config.architecture == Architecture::kQwen3
                                        ? 128
                                        : std::max<int64_t>(1, config.hidden_size / config.num_heads));
  if (config.head_dim % 2 != 0)
    keys.fail("head_dim", str(config.head_dim), "an even number: rotary positions turn pairs");
  if (config.num_heads > kMaxWidth / config.head_dim)
    keys.fail("num_attention_heads", str(config.num_heads),
              str("at most ", kMaxWidth, " / head_dim ", config.head_dim));
}

int32_t stop_token(const Json& value, const std::string& where) {
  if (!value.is_number_integer() || value < 0 || value > kMaxVocabulary)
    throw UserError(
        str(where, ", key 'eos_token_id': got ", shown(value), "; expected a token id or a list of them"));
  return value.get<int32_t>();
}

}  // namespace

int64_t ModelConfig::num_parameters() const {
  const int64_t q = num_heads * head_dim;
  const int64_t kv = num_kv_heads * head_dim;
  int64_t layer =
      hidden_size * (q + 2 * kv) + q * hidden_size + 3 * hidden_size * intermediate_size + 2 * hidden_size;
  if (qkv_bias) layer += q + 2 * kv;
  if (output_bias) layer += hidden_size;
  if (qk_norm) layer += 2 * head_dim;
  return num_layers * layer + hidden_size + vocab_size * hidden_size * (tie_word_embeddings ? 1 : 2);
}

ModelConfig parse_model_config(const Json& json, const std::string& where) {
  if (!json.is_object())
    throw UserError(str(where, ": got ", shown(json), "; expected an object, a model's config"));
  const Keys keys(json, where);
  ModelConfig config;
  config.architecture = read_architecture(keys).architecture;
  read_sizes(keys, config);
  refuse_what_changes_the_result(keys, config);
  config.rms_norm_eps = keys.positive_or("rms_norm_eps", 1, 1e-6);
  config.rope_theta = read_rope_theta(keys);
  config.tie_word_embeddings = keys.flag_or("tie_word_embeddings", false);
  config.qk_norm = config.architecture == Architecture::kQwen3;
  const bool llama_bias =
      config.architecture == Architecture::kLlama && keys.flag_or("attention_bias", false);
  config.qkv_bias = llama_bias || config.architecture == Architecture::kQwen2;
  config.output_bias = llama_bias;
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

std::vector<int32_t> load_stop_tokens(const std::filesystem::path& directory) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    const std::filesystem::path file = directory / name;
    if (!std::filesystem::exists(file)) continue;
    const Json json = read_json(file);
    if (!json.is_object()) throw UserError(str(file.string(), ": got ", shown(json), "; expected an object"));
    const Keys keys(json, file.string());
    if (!keys.has("eos_token_id")) continue;
    const Json& ids = keys.get("eos_token_id");
    std::vector<int32_t> tokens;
    if (!ids.is_array()) return {stop_token(ids, file.string())};
    for (const Json& id : ids) tokens.push_back(stop_token(id, file.string()));
    return tokens;
  }
  return {};
}

}  // namespace bough

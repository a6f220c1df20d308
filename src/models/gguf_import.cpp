#include "models/gguf_import.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>
#include <vector>

#include "base/error.h"
#include "base/progress.h"
#include "models/config.h"
#include "models/safetensors.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

// What llama.cpp's converter did to a tensor, to be undone.
enum class Change {
  kNone,
  kRotaryPairsQ,  // rows of a head: pairs (i, i + H/2) stand beside each other
  kRotaryPairsK,
};

// A tensor under its two names; `#` stands for the layer. The shape is spelled with the letters of the legend
// and Q = N H, K = G H.
struct TensorName {
  const char* gguf;
  const char* hugging_face;
  const char* shape;
  Change change = Change::kNone;
  bool optional = false;
};

struct Family {
  const char* gguf;        // general.architecture, and the prefix of its metadata
  const char* class_name;  // what config.json calls it
  const char* model_type;
  std::vector<TensorName> names;
};

std::vector<TensorName> common_names(Change q, Change k) {
  return {
      {"token_embd.weight", "model.embed_tokens.weight", "VD"},
      {"output_norm.weight", "model.norm.weight", "D"},
      {"output.weight", "lm_head.weight", "VD", Change::kNone, true},
      {"blk.#.attn_norm.weight", "model.layers.#.input_layernorm.weight", "D"},
      {"blk.#.attn_q.weight", "model.layers.#.self_attn.q_proj.weight", "QD", q},
      {"blk.#.attn_k.weight", "model.layers.#.self_attn.k_proj.weight", "KD", k},
      {"blk.#.attn_v.weight", "model.layers.#.self_attn.v_proj.weight", "KD"},
      {"blk.#.attn_output.weight", "model.layers.#.self_attn.o_proj.weight", "DQ"},
      {"blk.#.ffn_norm.weight", "model.layers.#.post_attention_layernorm.weight", "D"},
      {"blk.#.ffn_gate.weight", "model.layers.#.mlp.gate_proj.weight", "FD"},
      {"blk.#.ffn_up.weight", "model.layers.#.mlp.up_proj.weight", "FD"},
      {"blk.#.ffn_down.weight", "model.layers.#.mlp.down_proj.weight", "DF"},
  };
}

std::vector<TensorName> operator+(std::vector<TensorName> names, std::vector<TensorName> more) {
  names.insert(names.end(), more.begin(), more.end());
  return names;
}

std::vector<TensorName> qkv_biases(Change q, Change k, bool optional) {
  return {
      {"blk.#.attn_q.bias", "model.layers.#.self_attn.q_proj.bias", "Q", q, optional},
      {"blk.#.attn_k.bias", "model.layers.#.self_attn.k_proj.bias", "K", k, optional},
      {"blk.#.attn_v.bias", "model.layers.#.self_attn.v_proj.bias", "K", Change::kNone, optional},
  };
}

// A family of decoders is one entry here. SmolLM2, Llama 2 and 3 and Mistral all come as `llama`.
const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {"llama", "LlamaForCausalLM", "llama",
       common_names(Change::kRotaryPairsQ, Change::kRotaryPairsK) +
           qkv_biases(Change::kRotaryPairsQ, Change::kRotaryPairsK, true) +
           std::vector<TensorName>{
               {"blk.#.attn_output.bias", "model.layers.#.self_attn.o_proj.bias", "D", Change::kNone, true}}},
      {"qwen2", "Qwen2ForCausalLM", "qwen2",
       common_names(Change::kNone, Change::kNone) + qkv_biases(Change::kNone, Change::kNone, false)},
      {"qwen3", "Qwen3ForCausalLM", "qwen3",
       common_names(Change::kNone, Change::kNone) +
           std::vector<TensorName>{
               {"blk.#.attn_q_norm.weight", "model.layers.#.self_attn.q_norm.weight", "H"},
               {"blk.#.attn_k_norm.weight", "model.layers.#.self_attn.k_norm.weight", "H"}}},
  };
  return all;
}

// The angles of Llama 3.1 and later come as this tensor of divisors, one a frequency.
constexpr const char* kRopeFrequencies = "rope_freqs.weight";

const Family& find_family(const GgufFile& file) {
  const std::string name = file.text("general.architecture");
  std::string names;
  for (const Family& family : families()) {
    if (name == family.gguf) return family;
    names += (names.empty() ? "" : ", ") + std::string(family.gguf);
  }
  file.fail(str("metadata 'general.architecture': got ", quoted(name), "; expected one of ", names,
                ": no other is read from GGUF; use the model's original Hugging Face directory"));
}

std::string with_layer(std::string name, int64_t layer) {
  const size_t place = name.find('#');
  return place == std::string::npos ? name : name.replace(place, 1, std::to_string(layer));
}

bool is_of_layers(const TensorName& name) {
  return std::string_view(name.gguf).find('#') != std::string_view::npos;
}

// Reads the metadata of the model itself, under "<architecture>.".
class Importer {
 public:
  Importer(const GgufFile& file, const std::string& pre)
      : file_(file), family_(find_family(file)), tokenizer_(read_gguf_tokenizer(file, pre)) {
    refuse_unknown_keys();
    read_config();
    name_tensors();
    config_["dtype"] = "float32";
    parsed_ = parse_model_config(config_, file.path().string() + " (as config.json)");
  }

  at::ScalarType natural_dtype() const;
  ImportReport write(const fs::path& directory, at::ScalarType dtype);

 private:
  struct Tensor {
    std::string gguf, hugging_face;
    Change change;
  };

  std::string key(const std::string& name) const { return str(family_.gguf, ".", name); }
  int64_t size(const std::string& name) const;
  void refuse_unknown_keys() const;
  void read_config();
  Json rope_parameters() const;
  Json llama3_scaling() const;
  void name_tensors();
  void name_tensor(const TensorName& name, int64_t layer);
  at::Tensor values(const Tensor& tensor) const;

  const GgufFile& file_;
  const Family& family_;
  GgufTokenizer tokenizer_;
  Json config_;
  ModelConfig parsed_;
  std::vector<Tensor> tensors_;
  std::set<std::string> used_;
};

// Reads a size that config.json has: from 1 to 2^31, so that products of two fit 64 bits.
int64_t Importer::size(const std::string& name) const {
  const int64_t value = file_.integer(key(name));
  if (value < 1 || value > (int64_t{1} << 31))
    file_.damaged(str("metadata ", quoted(key(name)), ": got ", value, "; expected a number from 1 to 2^31"));
  return value;
}

// Refuses keys of the architecture that nothing here reads: they might change what the model computes.
void Importer::refuse_unknown_keys() const {
  static const std::set<std::string> known = {"block_count",
                                              "context_length",
                                              "embedding_length",
                                              "feed_forward_length",
                                              "attention.head_count",
                                              "attention.head_count_kv",
                                              "attention.key_length",
                                              "attention.value_length",
                                              "attention.layer_norm_rms_epsilon",
                                              "rope.freq_base",
                                              "rope.dimension_count",
                                              "rope.scaling.type",
                                              "rope.scaling.factor",
                                              "rope.scaling.original_context_length",
                                              "rope.scaling.finetuned",  // says where the factor comes from
                                              "vocab_size"};
  for (const auto& [name, value] : file_.metadata().items()) {
    const std::string prefix = str(family_.gguf, ".");
    if (!name.starts_with(prefix) || known.contains(name.substr(prefix.size()))) continue;
    const bool causal = name == key("attention.causal");
    // With expert_count 0 and the like the feature is off. Attention that is not causal is no decoder's.
    if (causal ? value == true : value == 0 || value == false) continue;
    file_.fail(str("metadata ", quoted(name), ": got ", quoted(dump_line(value)),
                   "; expected no such key: this feature of ", family_.gguf,
                   " models is not supported; use the model's original Hugging Face directory"));
  }
}

void Importer::read_config() {
  const auto embedding = file_.tensors().find("token_embd.weight");
  if (embedding == file_.tensors().end() || embedding->second.shape.size() != 2)
    file_.fail(
        "got no matrix 'token_embd.weight'; expected the embedding: this is no complete model (one of "
        "several files? only single files are read: merge them with llama-gguf-split --merge)");
  const int64_t rows = embedding->second.shape[0];
  if (rows < tokenizer_.num_tokens)
    file_.fail(str("tensor 'token_embd.weight': got ", rows, " rows; expected at least ",
                   tokenizer_.num_tokens, ", as many as there are tokens"));
  const int64_t width = size("embedding_length");
  const int64_t heads = size("attention.head_count");
  const int64_t kv_heads =
      file_.has(key("attention.head_count_kv")) ? size("attention.head_count_kv") : heads;
  if (!file_.has(key("attention.key_length")) && width % heads != 0)
    file_.fail(str("metadata ", quoted(key("attention.head_count")), ": got ", heads,
                   "; expected a divisor of ", width, ", the embedding_length"));
  const int64_t head_dim =
      file_.has(key("attention.key_length")) ? size("attention.key_length") : width / heads;
  for (const char* name : {"attention.value_length", "rope.dimension_count"})
    if (file_.has(key(name)) && size(name) != head_dim)
      file_.fail(str("metadata ", quoted(key(name)), ": got ", size(name), "; expected ", head_dim,
                     ", the size of a head: values of another size, or rotating a part of a head, are not "
                     "supported"));
  if (file_.has(key("vocab_size")) && size("vocab_size") != rows)
    file_.fail(str("metadata ", quoted(key("vocab_size")), ": got ", size("vocab_size"), "; expected ", rows,
                   ", the rows of 'token_embd.weight'"));
  const bool biased = file_.tensors().contains("blk.0.attn_q.bias");
  // The epsilon is stored in fp32: its shortest decimal form is what the model's author wrote (1e-05, not
  // 9.99999974e-06).
  const std::string epsilon_key = key("attention.layer_norm_rms_epsilon");
  const float epsilon = static_cast<float>(file_.number_or(epsilon_key, 0));
  if (!(epsilon > 0))
    file_.fail(str("metadata ", quoted(epsilon_key), ": got ", epsilon, "; expected a number above 0"));
  config_ = {{"architectures", Json::array({family_.class_name})},
             {"model_type", family_.model_type},
             {"vocab_size", rows},
             {"hidden_size", width},
             {"intermediate_size", size("feed_forward_length")},
             {"num_hidden_layers", size("block_count")},
             {"num_attention_heads", heads},
             {"num_key_value_heads", kv_heads},
             {"head_dim", head_dim},
             {"max_position_embeddings", size("context_length")},
             {"hidden_act", "silu"},
             {"rms_norm_eps", std::stod(str(epsilon))},
             {"rope_parameters", rope_parameters()},
             {"tie_word_embeddings", !file_.tensors().contains("output.weight")},
             {"attention_dropout", 0.0},
             {"initializer_range", 0.02},
             {"use_cache", true},
             {"bos_token_id", tokenizer_.bos},
             {"eos_token_id", tokenizer_.eos},
             {"pad_token_id", tokenizer_.pad}};
  if (family_.model_type == std::string("llama")) config_["attention_bias"] = biased;
  if (family_.model_type == std::string("llama")) config_["mlp_bias"] = false;
  if (family_.model_type == std::string("qwen3")) config_["attention_bias"] = false;
}

Json Importer::rope_parameters() const {
  Json rope = {{"rope_type", "default"}};
  const std::string type = file_.text_or(key("rope.scaling.type"), "none");
  const double factor = file_.number_or(key("rope.scaling.factor"), 1);
  if (file_.tensors().contains(kRopeFrequencies)) {
    if (type != "none")
      file_.fail(str("metadata ", quoted(key("rope.scaling.type")), ": got ", quoted(type),
                     " beside the tensor 'rope_freqs.weight'; expected one of the two"));
    rope = llama3_scaling();
  } else if (type == "linear" || type == "yarn") {
    rope = {{"rope_type", type}, {"factor", factor}};
    if (type == "yarn")
      rope["original_max_position_embeddings"] = size("rope.scaling.original_context_length");
  } else if (type != "none") {
    file_.fail(str("metadata ", quoted(key("rope.scaling.type")), ": got ", quoted(type),
                   "; expected none, linear or yarn: no other is supported"));
  }
  rope["rope_theta"] = std::stod(str(static_cast<float>(file_.number_or(key("rope.freq_base"), 1e4))));
  return rope;
}

// llama.cpp keeps the divisors of the angles, not what they came from. They follow from the factor (the
// largest of them) and three numbers that all models have in common: divisor 1 where the wave is shorter than
// 8192 / 4 positions, the factor where it is longer than 8192, between the two a blend of 1 and 1 / factor.
Json Importer::llama3_scaling() const {
  constexpr double kOriginal = 8192, kLow = 1, kHigh = 4;
  const at::Tensor stored = file_.dequantized(kRopeFrequencies);
  const int64_t head_dim =
      file_.integer_or(key("rope.dimension_count"), size("embedding_length") / size("attention.head_count"));
  const double theta = file_.number_or(key("rope.freq_base"), 1e4);
  const float* divisors = stored.data_ptr<float>();
  double factor = 0;
  for (int64_t i = 0; i < stored.numel(); ++i) factor = std::max<double>(factor, divisors[i]);
  bool equal = stored.numel() > 0 && 2 * stored.numel() == head_dim && factor >= 1;
  for (int64_t i = 0; i < stored.numel() && equal; ++i) {
    const double wave =
        2 * std::numbers::pi * std::pow(theta, 2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
    const double smooth = std::clamp((kOriginal / wave - kLow) / (kHigh - kLow), 0.0, 1.0);
    const double expected = 1 / ((1 - smooth) / factor + smooth);
    equal = std::abs(divisors[i] - expected) <= 1e-5 * expected;
  }
  if (!equal)
    file_.fail(str("tensor '", kRopeFrequencies,
                   "': got divisors of the rotary angles that are not those of Llama 3 "
                   "(factor, 1, 4, 8192); expected these: use the model's original Hugging Face directory"));
  return {{"rope_type", "llama3"},
          {"factor", std::stod(str(static_cast<float>(factor)))},
          {"low_freq_factor", kLow},
          {"high_freq_factor", kHigh},
          {"original_max_position_embeddings", static_cast<int64_t>(kOriginal)}};
}

void Importer::name_tensor(const TensorName& name, int64_t layer) {
  const std::string gguf = with_layer(name.gguf, layer);
  const auto found = file_.tensors().find(gguf);
  if (found == file_.tensors().end()) {
    // Biases come in all layers or in none, as the first layer has them.
    const bool expected = !name.optional || (layer > 0 && used_.contains(with_layer(name.gguf, 0)));
    if (expected)
      file_.fail(str("got no tensor ", quoted(gguf), "; expected it in a ", family_.gguf, " model"));
    return;
  }
  const int64_t heads = config_["num_attention_heads"], kv_heads = config_["num_key_value_heads"];
  const int64_t head_dim = config_["head_dim"];
  std::vector<int64_t> shape;
  for (const char* letter = name.shape; *letter; ++letter) {
    switch (*letter) {
      case 'V': shape.push_back(config_["vocab_size"]); break;
      case 'D': shape.push_back(config_["hidden_size"]); break;
      case 'F': shape.push_back(config_["intermediate_size"]); break;
      case 'H': shape.push_back(head_dim); break;
      case 'Q': shape.push_back(heads * head_dim); break;
      case 'K': shape.push_back(kv_heads * head_dim); break;
      default: BOUGH_CHECK(false, "no size for letter ", *letter, " of ", name.gguf);
    }
  }
  if (found->second.shape != shape)
    file_.fail(str("tensor ", quoted(gguf), ": got the shape ", dump_line(Json(found->second.shape)),
                   "; expected ", dump_line(Json(shape)), ", as the metadata says"));
  used_.insert(gguf);
  tensors_.push_back({gguf, with_layer(name.hugging_face, layer), name.change});
}

void Importer::name_tensors() {
  used_.insert(kRopeFrequencies);
  const int64_t layers = config_["num_hidden_layers"];
  if (layers > static_cast<int64_t>(file_.tensors().size()))
    file_.damaged(str("metadata ", quoted(key("block_count")), ": got ", layers, "; expected at most ",
                      file_.tensors().size(), ", the number of tensors"));
  for (const TensorName& name : family_.names)
    for (int64_t layer = 0; layer < (is_of_layers(name) ? layers : 1); ++layer) name_tensor(name, layer);
  for (const auto& [name, tensor] : file_.tensors())
    if (!used_.contains(name))
      file_.fail(str("got a tensor ", quoted(name), "; expected none of this name in a ", family_.gguf,
                     " model of ", layers, " layers: what it is for is not known, so it cannot be left out"));
  const bool q_bias = used_.contains("blk.0.attn_q.bias");
  if (family_.model_type == std::string("llama"))
    for (const std::string name : {"blk.0.attn_k.bias", "blk.0.attn_v.bias", "blk.0.attn_output.bias"})
      if (used_.contains(name) != q_bias)
        file_.fail(str("got ", q_bias ? "no tensor " : "a tensor ", quoted(name), " beside ",
                       q_bias ? "a" : "no",
                       " 'blk.0.attn_q.bias'; expected biases of q, k, v and output together or none"));
}

at::ScalarType Importer::natural_dtype() const {
  for (const auto& [name, tensor] : file_.tensors())
    if (tensor.shape.size() == 2 && (tensor.type == GgmlType::kF32 || tensor.type == GgmlType::kF16))
      return at::kFloat;
  return at::kBFloat16;
}

at::Tensor Importer::values(const Tensor& tensor) const {
  const at::Tensor stored = file_.dequantized(tensor.gguf);
  if (tensor.change == Change::kNone) return stored;
  const char* count = tensor.change == Change::kRotaryPairsQ ? "num_attention_heads" : "num_key_value_heads";
  const int64_t heads = config_[count], half = config_["head_dim"].get<int64_t>() / 2;
  return stored.view({heads, half, 2, -1}).transpose(1, 2).reshape(stored.sizes());
}

ImportReport Importer::write(const fs::path& directory, at::ScalarType dtype) {
  config_["dtype"] = dtype == at::kFloat ? "float32" : "bfloat16";
  Json generation = {{"do_sample", true}};
  if (!tokenizer_.bos.is_null()) generation["bos_token_id"] = tokenizer_.bos;
  if (tokenizer_.stops.size() == 1) generation["eos_token_id"] = tokenizer_.stops[0];
  if (tokenizer_.stops.size() > 1) generation["eos_token_id"] = tokenizer_.stops;
  if (!tokenizer_.pad.is_null()) generation["pad_token_id"] = tokenizer_.pad;
  tokenizer_.tokenizer_config["model_max_length"] = config_["max_position_embeddings"];
  write_file_atomically(directory / "tokenizer.json", dump_line(tokenizer_.tokenizer));
  write_file_atomically(directory / "tokenizer_config.json", dump_pretty(tokenizer_.tokenizer_config));
  write_file_atomically(directory / "generation_config.json", dump_pretty(generation));

  std::vector<SafetensorsSource> sources;
  Progress progress("import", static_cast<int64_t>(tensors_.size()), "tensors");
  for (const Tensor& tensor : tensors_)
    sources.push_back({tensor.hugging_face, dtype, file_.tensors().at(tensor.gguf).shape, [&, this] {
                         progress.advance();
                         return values(tensor);
                       }});
  AtomicFile weights(directory / "model.safetensors");
  write_safetensors(weights, sources);
  weights.commit();
  progress.finish();
  write_file_atomically(directory / "config.json", dump_pretty(config_));
  return {family_.class_name, tokenizer_.description, parsed_.num_parameters(), tokenizer_.num_tokens, dtype};
}

// Returns where the directory shall be; a folder that is there and may not be replaced is refused before the
// work.
fs::path checked_target(const fs::path& directory, bool force) {
  std::error_code error;
  if (directory.empty()) throw UserError("DIR: the folder's name is empty");
  // The path is taken without the slash at its end and through symbolic links, so that a rename puts it in
  // place.
  fs::path target = fs::weakly_canonical(directory, error);
  if (error) target = fs::absolute(directory);
  if (!target.has_filename()) target = target.parent_path();
  if (!fs::exists(target, error)) return target;
  if (!fs::is_directory(target, error))
    throw UserError(str("DIR: ", quoted(directory.string()), " is a file; name a folder"));
  if (fs::is_empty(target, error)) return target;
  if (!force)
    throw UserError(str("DIR: ", quoted(directory.string()),
                        " is not empty; name a new folder, or give --force to replace the model in it"));
  if (!fs::exists(target / "config.json", error))
    throw UserError(str("DIR: ", quoted(directory.string()),
                        " holds no config.json, so it is no model that --force ",
                        "could replace (the whole folder would go); name another"));
  return target;
}

}  // namespace

ImportReport import_gguf(const fs::path& file, const fs::path& directory, const ImportOptions& options) {
  const fs::path target = checked_target(directory, options.force);
  const GgufFile source(file);
  Importer importer(source, options.pre);
  struct Folder {
    fs::path path;
    ~Folder() {
      std::error_code ignored;
      fs::remove_all(path, ignored);  // nothing is there once it was published
    }
  } aside{target.parent_path() / str(".", target.filename().string(), ".importing.", ::getpid())};
  make_directories(aside.path);
  const ImportReport report = importer.write(aside.path, options.dtype.value_or(importer.natural_dtype()));
  publish_directory(aside.path, target);
  return report;
}

}  // namespace bough

#include "models/checkpoint.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <iomanip>
#include <map>
#include <memory>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/file.h"
#include "models/stored_weights.h"
#include "models/tensor_parallel.h"
#include "text/stop_tokens.h"

namespace bough {

namespace {

namespace fs = std::filesystem;

constexpr const char* kTokenizerFiles[] = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt",     "tokenizer.model",       "chat_template.jinja",     "chat_template.json"};
constexpr const char* kTemplates = "additional_chat_templates";
constexpr const char* kGenerationConfig = "generation_config.json";

// ---- loading ----

bool is_float(at::ScalarType type) {
  return type == at::kDouble || type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

// A critic's backbone computes no logits: it reads the lm_head of no file.
bool may_be_ignored(const std::string& name, const SafetensorsEntry& entry, const ModelConfig& config) {
  if (name.ends_with("rotary_emb.inv_freq")) return true;
  return config.tie_word_embeddings && name == kHeadTensor &&
         entry.shape == std::vector<int64_t>{config.vocab_size, config.hidden_size};
}

// transformers 5 does not tie two different matrices. Older versions and vLLM drop the file's lm_head.
void check_tied_head(const fs::path& directory, const StoredWeights& weights, const ModelConfig& config) {
  if (!config.tie_word_embeddings || !config.computes_logits || !weights.contains(kHeadTensor)) return;
  const at::Tensor head = weights.tensor(kHeadTensor), embedding = weights.tensor(kEmbeddingTensor);
  const at::ScalarType type = c10::promoteTypes(head.scalar_type(), embedding.scalar_type());
  if (at::equal(head.to(type), embedding.to(type))) return;
  const bool is_given = config.source.is_object() && config.source.contains("tie_word_embeddings");
  throw UserError(bough::str(
      (directory / "config.json").string(), ", key 'tie_word_embeddings': got true",
      is_given ? "" : bough::str(" (the default of ", config.family->name, ")"), ", but ",
      weights.file_of(kHeadTensor).filename().string(), " has a ", kHeadTensor, " that differs from ",
      kEmbeddingTensor,
      "; expected equal values. If the model has an lm_head of its own, set tie_word_embeddings to false; if "
      "not, delete ",
      kHeadTensor, " from the file"));
}

// Adds a few of many names, so that a wrong model does not print thousands of names.
void append_some(std::string& message, const char* what, const std::vector<std::string>& items) {
  constexpr size_t kShown = 5;
  if (items.empty()) return;
  message += str("\n  ", items.size(), " ", what, ": ");
  for (size_t i = 0; i < std::min(items.size(), kShown); ++i) message += str(i > 0 ? ", " : "", items[i]);
  if (items.size() > kShown) message += ", …";
}

// Compares the stored tensors with the model's. Reads no tensor data, so it can run before memory is
// allocated.
void check_weights(const fs::path& directory, const StoredWeights& weights, Model& model) {
  std::vector<std::string> missing, extra, wrong;
  std::set<std::string> expected_names;
  for (const Parameter* parameter : model.parameters()) {
    for (const Parameter::Part& part : parameter->parts) {
      expected_names.insert(part.name);
      if (!weights.contains(part.name)) {
        missing.push_back(part.name);
        continue;
      }
      const SafetensorsEntry entry = weights.entry(part.name);
      const std::vector<int64_t> expected = unsharded_sizes(*parameter, part);
      if (entry.shape != expected)
        wrong.push_back(
            str(part.name, " (got ", shape_text(entry.shape), ", expected ", shape_text(expected), ")"));
      else if (!is_float(entry.dtype))
        wrong.push_back(
            str(part.name, " (got ", c10::toString(entry.dtype), ", expected a floating-point type)"));
    }
  }
  if (model.ranks().stages) {  // the files also hold the other stages' tensors
    const auto all = make_model(model.unsharded_config(), model.dtype(), at::kMeta);
    for (const Parameter* parameter : all->parameters())
      for (const Parameter::Part& part : parameter->parts) expected_names.insert(part.name);
  }
  for (const auto& [name, place] : weights.places())
    if (!expected_names.contains(name) && !may_be_ignored(name, weights.entry(name), model.config()))
      extra.push_back(quoted(name));
  if (missing.empty() && extra.empty() && wrong.empty()) return;
  std::string message =
      str(directory.string(), ": got weights that are not those of the model in config.json");
  append_some(message, "missing", missing);
  append_some(message, "of the wrong shape or type", wrong);
  append_some(message, "extra", extra);
  if (std::ranges::find(missing, kHeadTensor) != missing.end())
    message += "\n  If the embedding is the lm_head, set tie_word_embeddings to true in config.json";
  throw UserError(message +
                  "\n  expected the config.json that was saved with these weights: copy both again");
}

void copy_weights(const StoredWeights& weights, Model& model) {
  for (Parameter* parameter : model.parameters())
    for (const Parameter::Part& part : parameter->parts)
      parameter->part_value(part).copy_(own_piece(weights.tensor(part.name), *parameter, part));
}

// ---- saving ----

const char* dtype_text(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return "float64";
    case at::kFloat: return "float32";
    case at::kBFloat16: return "bfloat16";
    case at::kHalf: return "float16";
    default: BOUGH_CHECK(false, "a model cannot be stored as ", c10::toString(type));
  }
}

// Returns config.json as it was read, except for the keys that saving sets.
Json saved_config(const ModelConfig& config, at::ScalarType dtype) {
  Json json =
      config.source.is_object() && !config.source.empty() ? config.source : write_model_config(config);
  json["architectures"] = Json::array({config.family->class_name});
  json["model_type"] = config.family->model_type;
  if (json.contains("torch_dtype")) json["torch_dtype"] = dtype_text(dtype);
  if (json.contains("dtype") || !json.contains("torch_dtype")) json["dtype"] = dtype_text(dtype);
  return json;
}

std::vector<NamedTensors> split_into_shards(const NamedTensors& tensors, const SaveOptions& options) {
  std::vector<NamedTensors> shards;
  int64_t bytes = 0;
  for (const auto& named : tensors) {
    const int64_t size = stored_bytes(named.second, options.dtype);
    if (shards.empty() || bytes + size > options.max_shard_bytes) shards.emplace_back(), bytes = 0;
    shards.back().push_back(named);
    bytes += size;
  }
  return shards;
}

std::string shard_name(size_t shard, size_t num_shards) {
  if (num_shards == 1) return kSingleWeights;
  std::ostringstream name;
  name << std::setfill('0') << "model-" << std::setw(5) << shard + 1 << "-of-" << std::setw(5) << num_shards
       << ".safetensors";
  return name.str();
}

Json make_index(const std::vector<NamedTensors>& shards, const SaveOptions& options) {
  Json weight_map = Json::object();
  int64_t total_bytes = 0;
  int64_t total_parameters = 0;
  for (size_t i = 0; i < shards.size(); ++i)
    for (const auto& [name, tensor] : shards[i]) {
      weight_map[name] = shard_name(i, shards.size());
      total_bytes += stored_bytes(tensor, options.dtype);
      total_parameters += tensor.numel();
    }
  return {{"metadata", {{"total_size", total_bytes}, {"total_parameters", total_parameters}}},
          {"weight_map", weight_map}};
}

// Removes weight files of an earlier save with another number of shards. They would be loaded instead of the
// new files, or stay unused.
void remove_stale_weights(const fs::path& directory, const std::set<std::string>& written) {
  std::vector<fs::path> stale;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    const bool is_weights = name == kSingleWeights || name == kWeightsIndex ||
                            (name.starts_with("model-") && name.ends_with(".safetensors"));
    if (is_weights && !written.contains(name)) stale.push_back(entry.path());
  }
  for (const fs::path& path : stale) fs::remove(path);
}

// Config and weights are all written to temporary files before any file is renamed.
void write_config_and_weights(const fs::path& directory, const Json& config, const NamedTensors& weights,
                              const SaveOptions& options) {
  const std::vector<NamedTensors> shards = split_into_shards(weights, options);
  std::vector<std::unique_ptr<AtomicFile>> files;
  std::set<std::string> written;
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size());
    files.push_back(std::make_unique<AtomicFile>(directory / name));
    write_safetensors(*files.back(), shards[i], options.dtype);
    written.insert(name);
  }
  if (shards.size() > 1) {
    files.push_back(std::make_unique<AtomicFile>(directory / kWeightsIndex));
    files.back()->write(dump_pretty(make_index(shards, options)));
    written.insert(kWeightsIndex);
  }
  files.push_back(std::make_unique<AtomicFile>(directory / "config.json"));
  files.back()->write(dump_pretty(config));
  for (const auto& file : files) file->commit();
  remove_stale_weights(directory, written);
}

NamedTensors named_parts(const std::vector<Parameter*>& parameters, const ModelRanks& ranks,
                         at::Tensor (Parameter::*part_of)(const Parameter::Part&) const) {
  NamedTensors tensors;
  for (const Parameter* parameter : parameters)
    for (const Parameter::Part& part : parameter->parts) {
      const at::Tensor own = (parameter->*part_of)(part);
      if (ranks.tensor) add_pieces(tensors, part.name, gather_pieces(own, *parameter, part, *ranks.tensor));
      else tensors.emplace_back(part.name, own);
    }
  if (!ranks.stages) return tensors;
  NamedTensors all;
  gather_to_first_stage(tensors, *ranks.stages, [&](const std::string& name, const at::Tensor& tensor) {
    all.emplace_back(name, tensor);
  });
  return ranks.stages->rank() == 0 ? all : tensors;
}

}  // namespace

at::ScalarType stored_type(const fs::path& directory) {
  const StoredWeights weights(directory);
  std::optional<at::ScalarType> type;
  for (const auto& [name, place] : weights.places()) {
    const at::ScalarType own = weights.entry(name).dtype;
    if (!is_float(own) || name.ends_with("rotary_emb.inv_freq")) continue;
    type = type ? c10::promoteTypes(*type, own) : own;
  }
  if (!type)
    throw UserError(
        str(directory.string(), ": got no floating-point weights; expected a Hugging Face model's"));
  return *type;
}

void load_weights(const fs::path& directory, Model& model) {
  StoredWeights weights(directory);
  weights.match(model.config());
  check_weights(directory, weights, model);
  check_tied_head(directory, weights, model.config());
  copy_weights(weights, model);
}

std::unique_ptr<Model> load_model(const fs::path& directory, at::ScalarType dtype, at::Device device,
                                  const ModelRanks& ranks) {
  const ModelConfig config = load_model_config(directory);
  StoredWeights weights(directory);
  weights.match(config);
  // A model on the meta device has shapes and no memory. If a config describes a model a thousand times
  // larger than its weights, this is an error, not an allocation.
  check_weights(directory, weights, *make_model(config, dtype, at::kMeta, ranks));
  check_tied_head(directory, weights, config);
  std::unique_ptr<Model> model = make_model(config, dtype, device, ranks);
  copy_weights(weights, *model);
  return model;
}

NamedTensors named_weights(Model& model) {
  return named_parts(model.parameters(), model.ranks(), &Parameter::part_value);
}
NamedTensors named_gradients(Model& model) {
  return named_parts(model.trained_parameters(), model.ranks(), &Parameter::part_grad);
}

namespace {

// Returns the generation_config.json of a saved model if it must differ from that of `source`: with all stop
// tokens of the model, so that other programs end answers at the same tokens. Else null.
Json completed_generation(const fs::path& source) {
  if (source.empty() || !fs::is_regular_file(source / "tokenizer.json")) return {};
  std::optional<Tokenizer> tokenizer;
  try {
    tokenizer = Tokenizer::load(source);
  } catch (const UserError&) {
    return {};  // a tokenizer that Bough does not read, of a model that was trained on token ids
  }
  const std::vector<int32_t> tokens = load_stop_tokens(source, tokenizer);
  if (tokens == load_stop_tokens(source, std::nullopt)) return {};
  const fs::path file = source / kGenerationConfig;
  Json generation = fs::is_regular_file(file) ? read_json(file) : Json::object();
  generation["eos_token_id"] = tokens.size() == 1 ? Json(tokens[0]) : Json(tokens);
  return generation;
}

}  // namespace

void save_model(const fs::path& directory, Model& model, const SaveOptions& options) {
  BOUGH_CHECK(options.max_shard_bytes > 0, "max_shard_bytes ", options.max_shard_bytes);
  const Json config = saved_config(model.unsharded_config(), options.dtype.value_or(model.dtype()));
  const NamedTensors weights = named_weights(model);
  for (const Communicator* group : {model.tensor_ranks(), model.ranks().stages})
    if (group && group->rank() > 0) return;
  make_directories(directory);
  const auto copy_file = [&](const fs::path& name) {
    const fs::path source = options.copy_from / name;
    if (options.copy_from.empty() || !fs::is_regular_file(source)) return;
    if (fs::exists(directory / name) && fs::equivalent(source, directory / name)) return;
    write_file_atomically(directory / name, read_file(source));
  };
  for (const char* name : kTokenizerFiles) copy_file(name);
  if (!options.copy_from.empty() && fs::is_directory(options.copy_from / kTemplates)) {
    make_directories(directory / kTemplates);
    for (const auto& entry : fs::directory_iterator(options.copy_from / kTemplates))
      copy_file(fs::path(kTemplates) / entry.path().filename());
  }
  const Json generation = options.generation_config.is_object() ? options.generation_config
                                                                : completed_generation(options.copy_from);
  if (generation.is_null()) copy_file(kGenerationConfig);
  else write_file_atomically(directory / kGenerationConfig, dump_pretty(generation));
  write_config_and_weights(directory, config, weights, options);
}

}  // namespace bough

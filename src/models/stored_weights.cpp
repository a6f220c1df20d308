#include "models/stored_weights.h"

#include <set>

#include "base/error.h"

namespace bough {

namespace fs = std::filesystem;

StoredWeights::StoredWeights(const fs::path& directory) {
  if (fs::exists(directory / kSingleWeights)) add_file(directory / kSingleWeights);
  else if (fs::exists(directory / kWeightsIndex)) open_shards(directory);
  else
    throw UserError(str(
        directory.string(), ": got neither ", kSingleWeights, " nor ", kWeightsIndex,
        fs::exists(directory / "pytorch_model.bin")
            ? " (pytorch_model.bin is not read: save the model with transformers, which writes safetensors)"
            : "; expected a Hugging Face model's weights"));
}

void StoredWeights::add_file(const fs::path& path) {
  files_.push_back(std::make_unique<SafetensorsFile>(path));
  const SafetensorsFile* file = files_.back().get();
  for (const auto& [name, entry] : file->entries()) {
    const auto [other, is_new] = places_.emplace(name, Place{file, name});
    if (!is_new)
      throw UserError(str(path.string(), ": got tensor ", quoted(name), ", which ",
                          file_of(name).filename().string(), " has too; expected every tensor once"));
  }
}

void StoredWeights::open_shards(const fs::path& directory) {
  const fs::path index_path = directory / kWeightsIndex;
  const Json index = read_json(index_path);
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object())
    throw UserError(
        str(index_path.string(), ": got no object 'weight_map'; expected tensor names and their files"));
  std::set<std::string> names;
  for (const auto& [tensor, file] : map->items()) {
    // A name with a folder in it could reach any file of the machine.
    const bool plain = file.is_string() &&
                       fs::path(file.get<std::string>()).filename() == file.get<std::string>() &&
                       !file.get<std::string>().empty();
    if (!plain)
      throw UserError(str(index_path.string(), ": got ", quoted(dump_line(file)), " for tensor ",
                          quoted(tensor), "; expected the name of a file beside it"));
    names.insert(file.get<std::string>());
  }
  for (const std::string& name : names) {
    if (!fs::exists(directory / name))
      throw UserError(str(index_path.string(), ": got no file ", quoted(name), " beside it; expected all ",
                          names.size(), " shards: copy or download it again"));
    add_file(directory / name);
  }
  for (const auto& [tensor, file] : map->items()) {
    if (!contains(tensor) || file_of(tensor).filename() != file.get<std::string>())
      throw UserError(str(index_path.string(), ": tensor ", quoted(tensor), " is not in ",
                          quoted(file.get<std::string>()),
                          "; expected it there: index and shards are of different checkpoints"));
  }
}

SafetensorsEntry StoredWeights::entry(const std::string& name) const {
  const Place& place = places_.at(name);
  SafetensorsEntry entry = place.file->entries().at(place.stored_name);
  if (place.expert >= 0) entry.shape = {place.count, entry.shape[2]};
  return entry;
}

at::Tensor StoredWeights::tensor(const std::string& name) const {
  const Place& place = places_.at(name);
  const at::Tensor stored = place.file->tensor(place.stored_name);
  return place.expert < 0 ? stored : stored.select(0, place.expert).narrow(0, place.first, place.count);
}

void StoredWeights::match(const ModelConfig& config) {
  if (config.tie_word_embeddings && config.computes_logits && contains(kHeadTensor))
    places_.emplace(kEmbeddingTensor, places_.at(kHeadTensor));
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    if (config.is_sparse(layer)) split_fused_experts(config, layer);
}

void StoredWeights::split_fused(const std::string& fused, const std::vector<int64_t>& shape,
                                const std::vector<std::string>& rows_of_expert, const std::string& experts) {
  const auto found = places_.find(fused);
  // A file with both has tensors too many, which check_weights() reports.
  if (found == places_.end() || contains(str(experts, 0, ".", rows_of_expert[0], ".weight"))) return;
  const Place whole = found->second;
  const std::vector<int64_t> stored = entry(fused).shape;
  if (stored != shape)
    throw UserError(str(whole.file->path().string(), ": tensor ", quoted(fused), ": got shape ",
                        shape_text(stored), ", expected ", shape_text(shape),
                        " by config.json; copy both files again"));
  places_.erase(found);
  const int64_t count = shape[1] / static_cast<int64_t>(rows_of_expert.size());
  for (int64_t e = 0; e < shape[0]; ++e)
    for (size_t i = 0; i < rows_of_expert.size(); ++i)
      places_.emplace(str(experts, e, ".", rows_of_expert[i], ".weight"),
                      Place{whole.file, whole.stored_name, e, static_cast<int64_t>(i) * count, count});
}

void StoredWeights::split_fused_experts(const ModelConfig& config, int64_t layer) {
  const Experts& names = config.family->experts;
  const int64_t count = config.num_experts, width = config.hidden_size,
                inner = config.expert_intermediate_size;
  // In all classes, transformers' own name of the block is mlp.
  const std::string own = str("model.layers.", layer, ".mlp.");
  const std::string block = str("model.layers.", layer, ".", names.block, ".");
  split_fused(own + "experts.gate_up_proj", {count, 2 * inner, width}, {names.gate, names.up},
              block + "experts.");
  split_fused(own + "experts.down_proj", {count, width, inner}, {names.down}, block + "experts.");
  const auto router = places_.find(own + "gate.weight");
  if (own == block || router == places_.end() || contains(block + "gate.weight")) return;
  places_.emplace(block + "gate.weight", router->second);
  places_.erase(router);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += str(text.size() > 1 ? ", " : "", size);
  return text + "]";
}

}  // namespace bough

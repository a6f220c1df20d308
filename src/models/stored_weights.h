// The tensors of a Hugging Face directory under the names that the model's parts have (Parameter::parts), in
// one file or in shards. The bytes are mapped, not read, until a tensor is used.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "models/config.h"
#include "models/safetensors.h"

namespace bough {

class StoredWeights {
 public:
  // Chooses as transformers does: the single file if it exists, otherwise the index. Throws UserError if a
  // file is missing or damaged, or if index and shards are of different checkpoints.
  explicit StoredWeights(const std::filesystem::path& directory);

  // Name of a tensor -> where it is. first, count: the rows of the matrix `expert` of a fused tensor.
  struct Place {
    const SafetensorsFile* file;
    std::string stored_name;
    int64_t expert = -1, first = 0, count = 0;  // expert = -1: the whole tensor
  };
  const std::map<std::string, Place>& places() const { return places_; }
  bool contains(const std::string& name) const { return places_.contains(name); }
  const std::filesystem::path& file_of(const std::string& name) const {
    return places_.at(name).file->path();
  }
  SafetensorsEntry entry(const std::string& name) const;
  at::Tensor tensor(const std::string& name) const;

  // Adds the names of the model's parts for tensors that a writer may store in another way:
  //   - If the lm_head is the embedding, a file may have the matrix under either name: a writer that stores
  //     shared tensors once keeps one of the names.
  //   - A mixture's file may have transformers' own tensors in place of one tensor for each expert:
  //     mlp.experts.gate_up_proj [E, 2F, D] and mlp.experts.down_proj [E, D, F].
  // Throws UserError if a fused tensor has not the shape that the config says.
  void match(const ModelConfig& config);

 private:
  void add_file(const std::filesystem::path& path);
  void open_shards(const std::filesystem::path& directory);
  void split_fused_experts(const ModelConfig& config, int64_t layer);
  void split_fused(const std::string& fused, const std::vector<int64_t>& shape,
                   const std::vector<std::string>& rows_of_expert, const std::string& experts);

  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Place> places_;
};

inline constexpr const char* kSingleWeights = "model.safetensors";
inline constexpr const char* kWeightsIndex = "model.safetensors.index.json";
inline constexpr const char* kEmbeddingTensor = "model.embed_tokens.weight";
inline constexpr const char* kHeadTensor = "lm_head.weight";

// "[2, 3]"
std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace bough

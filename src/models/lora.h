// Low-rank adapters on the layers' matrices (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language
// Models"): y = W x + (alpha / rank) · B A x, W frozen. kernels/linear computes the term, in training and in
// generation alike; it is never added to W but by merge_adapter(), for export.
//
// An adapter belongs to a model object, not to the tensors of W: models that share() these may have one each,
// or none, and trained ones leave W as it is. The reference policy of a run is its model without_adapter().
//
// A and B have the model's element type; the optimizer keeps masters in fp32 for bf16, as for any parameter.
// Files are PEFT's: adapter_config.json and adapter_model.safetensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/settings.h"
#include "models/model.h"

namespace bough {

// A name in a list, or the list itself where it stands alone.
struct LoraTarget {
  std::string name;

  template <class V>
  void visit(V& v) {
    v("name", name, "all-linear, or the last part of modules' names, as q_proj");
  }
  static LoraTarget from_text(const std::string& text) { return {text}; }
  std::optional<std::string> to_text() const { return name; }
};

struct LoraSettings {
  int64_t rank = 0;
  double alpha = 16;
  std::vector<LoraTarget> targets = {{"all-linear"}};
  double dropout = 0;
  std::string path;

  bool enabled() const { return rank > 0 || !path.empty(); }

  template <class V>
  void visit(V& v) {
    v("rank", rank, "of the adapters; 0: of those in path, or none and every weight is trained",
      range(0, 65'536));
    v("alpha", alpha, "what B A x is multiplied by, times rank", above(0.0));
    v("targets", targets, "modules with an adapter: all-linear (every matrix of the layers), or names");
    v("dropout", dropout, "must be 0: log-probabilities would be those of no policy", range(0.0, 1.0));
    v("path", path,
      "an adapter to start from, in PEFT's format, which says rank, alpha and targets itself; empty: B = 0");
  }
  void check() const;  // UserError
};

bool has_adapter(const Model& model);

// Gives the model what the settings say: new adapters, A ~ U(-1/sqrt(inputs), 1/sqrt(inputs)) as PEFT
// initialises it, by the seed alone, and B = 0; or those of a file. The model's main_grads go: W is frozen.
// UserError: a target that the model does not have; see load_adapter.
void add_adapter(Model& model, const LoraSettings& settings, uint64_t seed);

// The same weights without the adapters.
std::unique_ptr<Model> without_adapter(const Model& model);

// Adds B A to each W, computed in fp32 (fp64 for an fp64 model) and rounded once; the adapters are gone then.
// The model must not share its weights.
void merge_adapter(Model& model);

// Every A and B under PEFT's name, as views.
std::vector<std::pair<std::string, at::Tensor>> adapter_tensors(Model& model);

// Writes PEFT's two files into the directory, made if it is missing. `base`: the directory or name of the
// model that the adapter stands beside.
void save_adapter(const std::filesystem::path& directory, Model& model, const std::string& base);

// Fills the adapters that the model has; gives it those of the file where it has none. UserError: a file that
// is none of PEFT's LoRA, or of another model; what is not computed here (DoRA, ranks that differ, biases,
// other modules that were trained too); where the model has adapters, others than those.
void load_adapter(const std::filesystem::path& directory, Model& model);

}  // namespace bough

// A model that a client trains: the base's weights, which all clients share, with an adapter and an optimizer
// of its own. Or a copy of all weights that is trained as a whole. Computation thread only.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/scratch_file.h"
#include "cost/cost_model.h"
#include "models/lora_settings.h"
#include "models/model.h"
#include "tinker/losses.h"
#include "train/optimizer.h"

namespace bough {

struct AdamParameters {
  double learning_rate = 1e-4, beta1 = 0.9, beta2 = 0.95, eps = 1e-12, weight_decay = 0;
  double grad_clip_norm = 0;  // 0: no clipping
};
// Reads an optim_step's parameters. Throws ApiError 400 if they are not Adam's or out of range.
AdamParameters read_adam(Fields& fields);

// How plans are made (plan/plan.h).
struct TrainingPlans {
  std::string strategy = "auto";
  int64_t max_tokens_per_pass = 0;  // 0: by device
  std::optional<int64_t> memory_bytes;
};

class TrainingModel {
 public:
  // `base` must outlive the object. adapter.rank 0: all weights are trained. A new adapter is a function of
  // the seed only.
  TrainingModel(const Model& base, const LoraSettings& adapter, uint64_t seed, TrainingPlans plans);

  // Computes requests of equal loss settings as one tree, and adds their gradients unless they are
  // forward_only, which must be equal, too. Returns a result for each request. The requests must have been
  // checked (check_datum).
  std::vector<ForwardBackwardResult> forward_backward(
      const std::vector<const ForwardBackwardRequest*>& requests, const TinkerLossSettings& settings);

  // Takes an optimizer step with the gradients since the last one. A gradient that is not finite is dropped,
  // and the weights stay. Returns metrics: grad_norm, skipped (1 if the gradient was dropped).
  std::map<std::string, double> optim_step(const AdamParameters& parameters);

  // Writes the adapter in PEFT's format, or all weights as a Hugging Face directory, and the optimizer's
  // state if asked for. `base`: the base model's directory.
  void save(const std::filesystem::path& directory, const std::string& base, bool with_optimizer);
  // Throws UserError if the files are not of this model. Gradients since the last step are dropped.
  void load(const std::filesystem::path& directory, bool with_optimizer);

  Model& model() { return *model_; }

  // Frees the memory of trained weights, gradients and the optimizer's state: on a GPU they move to host
  // memory, on a CPU into a file without a name in `folder`. Throws IoError if the disk is full; the model
  // then stays as it was. While it is parked, only unpark() is allowed.
  void park(const std::filesystem::path& folder);
  // Brings everything back, bit for bit. Does nothing if the model is not parked.
  void unpark();
  bool is_parked() const { return is_parked_; }

 private:
  struct Parked {
    ScratchFile file;
    std::vector<std::vector<int64_t>> sizes;  // of tensors()
  };
  std::vector<at::Tensor*> tensors();  // that are parked, those that are undefined left out
  Plan plan(const TinkerBatch& batch);

  const std::unique_ptr<Model> model_;
  const TrainingPlans plans_;
  std::unique_ptr<Optimizer> optimizer_;
  bool has_gradients_ = false;  // since the last optimizer step
  bool is_parked_ = false;
  std::optional<Parked> parked_;  // on a CPU
  std::optional<CostModel> costs_;
};

// Log-probabilities of a prompt's tokens from the second on, [T - 1], and with top_k > 0 the most likely
// tokens at these positions. `targets`: token ids [T - 1, K] whose log-probabilities replace them in the
// result, with 0 where an id is negative; nullopt: none.
struct PromptValues {
  std::vector<float> log_probs;
  WireTopK top;
  std::optional<WireTensor> targets;
};
PromptValues prompt_values(Model& model, const std::vector<int32_t>& tokens, int64_t top_k,
                           std::optional<WireTensor> targets);

}  // namespace bough

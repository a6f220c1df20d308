// A decoder: tokens in, final hidden states out. The caller implements attention (AttentionContext): training
// with the prefix KV stack (train/), generation with a KV cache (rollout/). So trainer, prefill and decode
// run the same model code.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "kernels/parameter.h"
#include "models/config.h"
#include "models/pipeline_stage.h"

namespace bough {

class AttentionContext {
 public:
  virtual ~AttentionContext() = default;

  // One layer: [T, D] to [T, D]. output_is_read == false: only the graph of the result is used, so its values
  // may be wrong.
  using Layer = std::function<at::Tensor(const at::Tensor& x_TD, bool output_is_read)>;

  // Computes one layer of the pass. Called in the order of layers. A training pass that holds only its layer
  // inputs stores `compute`, and calls it again just before the layer's backward.
  virtual at::Tensor layer(int64_t index, const at::Tensor& x_TD, const Layer& compute) {
    static_cast<void>(index);
    return compute(x_TD, true);
  }

  // Attention of one layer for the pass's tokens. q_TNH, k_TGH, v_TGH: after q/k norm and rotary embedding,
  // last dimension contiguous (they may be strided views). Returns o_TNH, same dtype. Called once per layer
  // in order, and once more if layer() recomputes the layer. The implementation must store the keys and
  // values that later tokens need.
  virtual at::Tensor attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                            const at::Tensor& v_TGH) = 0;

  // Chooses the experts of a layer of a mixture. logits_TE: the router's, accumulator type, with their graph.
  // Returns int64 [T, num_chosen], distinct in each row. Called like attend(). Default: choose_experts()
  // (kernels/experts). A context that replays recorded experts returns these instead.
  virtual at::Tensor route(int64_t layer, const at::Tensor& logits_TE, int64_t num_chosen);
};

// The precision of a router's product, before the softmax in the accumulator type. kModel rounds the logits
// to the model's dtype, as transformers does. It differs from kAccumulator in bf16 only.
enum class RouterType { kAccumulator, kModel };
inline RouterType router_type_named(const std::string& name) {
  return name == "model" ? RouterType::kModel : RouterType::kAccumulator;
}

// The precision of the logits. kModel rounds them to the model's dtype. kAccumulator keeps the sums of the
// products in the accumulator type. It differs from kModel in bf16 only.
enum class HeadType { kModel, kAccumulator };
inline HeadType head_type_named(const std::string& name) {
  return name == "fp32" ? HeadType::kAccumulator : HeadType::kModel;
}

// The precisions that settings and options choose beside the dtype.
struct Precisions {
  RouterType router = RouterType::kAccumulator;
  HeadType head = HeadType::kModel;
};

class Model {
 public:
  virtual ~Model() = default;

  // config(): the local part. If ranks share the model, it counts only this rank's layers (pipeline_stage.h),
  // heads and feed-forward elements (tensor_parallel.h). unsharded_config(): the unsharded model.
  const ModelConfig& config() const { return config_; }
  const ModelConfig& unsharded_config() const { return unsharded_config_; }
  // The process groups that share the model. A process group of one rank is nullptr.
  const ModelRanks& ranks() const { return ranks_; }
  // The tensor-parallel group, or nullptr.
  Communicator* tensor_ranks() const { return ranks_.tensor; }
  const Stage& stage() const { return stage_; }
  bool is_unsharded() const { return !ranks_.tensor && !ranks_.stages; }
  // The first token id of the local rows of the lm_head.
  int64_t first_token() const { return head().parts[0].first; }
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return device_; }

  // tokens_T, positions_T: int64 on the model's device, in any order; `attention` decides which tokens see
  // each other. Returns the hidden states after the final norm, [T, D], model dtype. With at::GradMode on,
  // records an autograd graph whose backward adds to the parameters' main_grad.
  // Pipeline stages: all but the first take the previous stage's output [T, D] as tokens_T. All but the last
  // return the hidden states after their last layer, without the final norm.
  virtual at::Tensor forward(const at::Tensor& tokens_T, const at::Tensor& positions_T,
                             AttentionContext& attention) const = 0;

  // Every parameter once, in a fixed order. Tied weights appear once, as the embedding. Adapters are left
  // out; they belong to their matrices (Parameter::adapter).
  virtual std::vector<Parameter*> parameters() = 0;
  // [V, D], or the local rows. If tied, head() is the embedding. On pipeline stages that do not have the
  // parameter, its `value` is an undefined tensor. An adapter of a tied matrix acts on the logits only.
  virtual const Parameter& embedding() const = 0;
  virtual const Parameter& head() const = 0;
  // The tied embedding if it is trained and this is the first or the last of several stages, else nullptr.
  Parameter* trained_at_both_ends();

  // The trained parameters in a fixed order. With adapters (models/lora.h): only the adapters' parameters.
  // Without: all parameters. A stage may have none.
  std::vector<Parameter*> trained_parameters();
  // Number of elements of all adapters, other stages included, and of the lm_head's adapter among them. 0: no
  // adapters. lora.h sets them.
  int64_t adapter_elements() const { return adapter_elements_; }
  int64_t head_adapter_elements() const { return head_adapter_elements_; }
  void set_adapter_elements(int64_t count, int64_t of_head) {
    adapter_elements_ = count;
    head_adapter_elements_ = of_head;
  }

  // Another model over the same tensors. In-place changes are visible in both. If one model then gets a new
  // tensor for a parameter, the other keeps the old one.
  virtual std::unique_ptr<Model> share() const = 0;
  // The matrices of the layers' linear products. Quantization replaces these (quantized_model.h). Routers are
  // not among them: their products decide which experts a token uses.
  virtual std::vector<Parameter*> layer_matrices() = 0;
  // Those of the layers' matrices that hold experts, which have no adapters.
  virtual std::vector<Parameter*> expert_matrices() { return {}; }
  // The matrices that can have an adapter: those of the layers without the experts and, where logits are
  // computed, head().
  std::vector<Parameter*> adaptable_matrices();
  // If the lm_head is tied: makes it a parameter of its own, with a copy of the embedding's values, and moves
  // the adapter there. The model must be unsharded.
  virtual void untie_head() = 0;

  // logits[R, V] = hidden_RD · lm_head^T, of logits_dtype(). If ranks share the vocabulary, this is a
  // collective call that returns all columns on every rank.
  at::Tensor logits(const at::Tensor& hidden_RD) const;
  // The logits of the local vocabulary rows, from first_token() on.
  at::Tensor own_logits(const at::Tensor& hidden_RD) const;

  // Batch-invariant: a token's hidden states and logits have the same bits whatever else is in the pass, on
  // any number of threads. The AttentionContext must read this flag and be batch-invariant too. Then
  // generation and training agree. Backward passes do not change.
  bool batch_invariant() const { return batch_invariant_; }
  // Throws UserError if `on` and why_not_batch_invariant() returns a reason.
  void set_batch_invariant(bool on);
  std::optional<std::string> why_not_batch_invariant() const;

  RouterType router_type() const { return router_type_; }
  // Throws UserError if `type` has no effect: kModel for a dense model, or for a dtype other than bf16.
  void set_router_type(RouterType type);

  HeadType head_type() const { return head_type_; }
  at::ScalarType logits_dtype() const;
  // Throws UserError if kAccumulator has no effect, because the dtype is not bf16, or on a GPU.
  void set_head_type(HeadType type);
  // set_router_type() and set_head_type().
  void set_precisions(const Precisions& precisions);

  // Allocates zeroed main_grads (accumulator type) for trained parameters that have none.
  void allocate_gradients();
  void zero_gradients();

 protected:
  explicit Model(const ModelConfig& config, const at::TensorOptions& options = {},
                 const ModelRanks& ranks = {});
  ModelConfig config_, unsharded_config_;
  ModelRanks ranks_;  // nullptr for groups of one rank
  Stage stage_;

 private:
  at::ScalarType dtype_;
  at::Device device_;
  bool batch_invariant_ = false;
  RouterType router_type_ = RouterType::kAccumulator;
  HeadType head_type_ = HeadType::kModel;
  int64_t adapter_elements_ = 0, head_adapter_elements_ = 0;
};

// Returns a model with allocated, uninitialised weights. All families use the decoder of models/decoder.cpp.
// `ranks`: the process groups that share the model; they must outlive it. nullptr or one rank: not shared.
std::unique_ptr<Model> make_model(const ModelConfig& config, at::ScalarType dtype,
                                  at::Device device = at::kCPU, const ModelRanks& ranks = {});

// The same without memory for weights: each parameter's value is on the device meta until the caller sets it.
std::unique_ptr<Model> make_model_without_weights(const ModelConfig& config, at::ScalarType dtype,
                                                  at::Device device);

// Initialises as transformers does: matrices from Normal(0, 0.02), norms that multiply by 1, biases 0. A
// function of the seed only. The model must be unsharded.
void initialise(Model& model, uint64_t seed);

// Loads a Hugging Face directory (config.json, model.safetensors or shards), converted to `dtype`. If ranks
// share the model, each rank reads only its pieces. Throws UserError like load_weights (checkpoint.h).
std::unique_ptr<Model> load_model(const std::filesystem::path& directory, at::ScalarType dtype,
                                  at::Device device = at::kCPU, const ModelRanks& ranks = {});

}  // namespace bough

// A decoder: tokens in, final hidden states out. What a token attends to is not its business: training
// answers with the tree's stack (train/), generation with a KV cache (rollout/), so that trainer, prefill and
// decode run the same code.
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
#include "models/pipeline.h"

namespace bough {

class AttentionContext {
 public:
  virtual ~AttentionContext() = default;

  // What a layer makes of its input, [T, D] both. `output_is_read` false: nobody reads the values of what it
  // returns, only the graph behind it.
  using Layer = std::function<at::Tensor(const at::Tensor& x_TD, bool output_is_read)>;

  // Computes one layer of the pass, in order of layers. A training pass that keeps no more than its layers'
  // inputs keeps `compute`, too, and calls it again just before the layer's backward.
  virtual at::Tensor layer(int64_t index, const at::Tensor& x_TD, const Layer& compute) {
    static_cast<void>(index);
    return compute(x_TD, true);
  }

  // Attention of one layer over whatever the pass's tokens see. q_TNH, k_TGH, v_TGH: after q/k norm and
  // rotary embedding, last dimension contiguous (they may be strided views). Returns o_TNH, same dtype.
  // Called once a layer, in order of layers, and once more where layer() computes it again. Keys and values
  // must be stored by the callee where later tokens need them.
  virtual at::Tensor attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                            const at::Tensor& v_TGH) = 0;
};

class Model {
 public:
  virtual ~Model() = default;

  // Of what this rank computes: where several ranks share the model, of its layers (pipeline.h), and of its
  // heads and feed-forward elements (tensor_parallel.h), else as the whole.
  const ModelConfig& config() const { return config_; }
  const ModelConfig& whole_config() const { return whole_config_; }
  // Those that have the other pieces of it.
  const ModelRanks& ranks() const { return ranks_; }
  // The ranks that share every pass with this one, or null.
  Communicator* tensor_ranks() const { return ranks_.tensor; }
  const Stage& stage() const { return stage_; }
  bool is_whole() const { return !ranks_.tensor && !ranks_.stages; }
  // The first token of the vocabulary that head() has rows of.
  int64_t first_token() const { return head().parts[0].first; }
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return device_; }

  // tokens_T, positions_T: int64 on the model's device, any tokens in any order (attention knows who sees
  // whom). Returns the hidden states after the final norm, [T, D], model dtype. Under at::GradMode it records
  // a graph for autograd whose backward adds to the parameters' main_grad. A stage takes in place of tokens
  // what the one before returned, [T, D], and returns the hidden states after its last layer; only the last
  // one norms them.
  virtual at::Tensor forward(const at::Tensor& tokens_T, const at::Tensor& positions_T,
                             AttentionContext& attention) const = 0;

  // Every parameter once, in a fixed order; tied weights once, under the embedding. Adapters are not among
  // them: they belong to the matrices that they stand beside.
  virtual std::vector<Parameter*> parameters() = 0;
  // [V, D], or this rank's rows of it; of as many rows, the embedding itself where tied. Undefined on stages
  // that do not have them.
  virtual const Parameter& embedding() const = 0;
  virtual const Parameter& head() const = 0;
  // Of the first stage and the last, where a tied embedding is trained: that; else null.
  Parameter* trained_at_both_ends();

  // What is trained: the parameters of the adapters where the model has any (models/lora.h), and all else is
  // frozen; else every parameter. In a fixed order. A stage may have none.
  std::vector<Parameter*> trained_parameters();
  // Elements of the adapters in all layers, those of the other stages too; 0: it has none. lora.h sets it.
  int64_t adapter_elements() const { return adapter_elements_; }
  void set_adapter_elements(int64_t count) { adapter_elements_ = count; }

  // Another model over the same tensors. A tensor that one of them is then given in place of another, the
  // other does not see.
  virtual std::unique_ptr<Model> share() const = 0;
  // The matrices of the layers' linear products: what quantization replaces (quantized_model.h).
  virtual std::vector<Parameter*> layer_matrices() = 0;

  // logits[R, V] = hidden_RD · head^T, model dtype; for generation (training goes through the fused head).
  at::Tensor logits(const at::Tensor& hidden_RD) const;
  // Of the tokens that this rank has rows of: those from first_token() on.
  at::Tensor own_logits(const at::Tensor& hidden_RD) const;

  // Batch-invariant: a token's hidden states and logits are the same bits whatever else is in the pass, on
  // any number of threads, if its attention is. Those who answer attention ask for it here, so that
  // generation and training agree. Backward passes are as ever.
  bool batch_invariant() const { return batch_invariant_; }
  // UserError where why_not_batch_invariant() has a reason.
  void set_batch_invariant(bool on);
  std::optional<std::string> why_not_batch_invariant() const;

  // Allocates zeroed main_grads (accumulator type) where what is trained has none.
  void allocate_gradients();
  void zero_gradients();

 protected:
  explicit Model(const ModelConfig& config, const at::TensorOptions& options = {},
                 const ModelRanks& ranks = {});
  ModelConfig config_, whole_config_;
  ModelRanks ranks_;  // null where they are this one alone
  Stage stage_;

 private:
  at::ScalarType dtype_;
  at::Device device_;
  bool batch_invariant_ = false;
  int64_t adapter_elements_ = 0;
};

// An uninitialised model of this shape: weights allocated, not filled. Which class: models/registry.cpp.
// `ranks`: those that share it, which must outlive it; null or one: it is whole.
std::unique_ptr<Model> make_model(const ModelConfig& config, at::ScalarType dtype,
                                  at::Device device = at::kCPU, const ModelRanks& ranks = {});

// Sets matrices to Normal(0, 0.02), norms to multiply by 1 and biases to zero, as transformers initialises; a
// function of the seed only.
void initialise(Model& model, uint64_t seed);

// Loads a Hugging Face directory (config.json, model.safetensors or shards), converting to `dtype`.
// Of several ranks each reads its pieces alone.
std::unique_ptr<Model> load_model(const std::filesystem::path& directory, at::ScalarType dtype,
                                  at::Device device = at::kCPU, const ModelRanks& ranks = {});

}  // namespace bough

// Cost of a pass through a decoder, from shapes alone: FLOPs and bytes. The bytes follow the lifetime of
// every tensor in models/decoder.cpp and train/head.cpp. The kernels' *_cost.h headers give their
// temporaries. If you change which tensors a pass keeps in memory, change of_kept() or of_temporaries() too.
// Otherwise cost/peak_memory_test.cpp fails. No torch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/common/device_kernels.h"
#include "models/config.h"
#include "plan/pass_costs.h"
#include "tree/prefix_tree.h"

namespace bough {

// A decoder's config and its element sizes. A multiply-add counts as two FLOPs.
struct ModelShape : ModelConfig {
  std::string name;
  int64_t element_bytes = 4;      // weights and activations
  int64_t accumulator_bytes = 4;  // gradients, softmax, norms
  bool has_wide_logits = false;   // logits of the accumulator type, which is wider than element_bytes
  // Elements of all adapters (models/lora.h), and of the lm_head's adapter among them. If adapter_elements is
  // above 0, nothing else is trained.
  int64_t adapter_elements = 0, head_adapter_elements = 0;
  // The routers of a mixture have losses (train/router_losses.h), whose backward needs the routers' logits.
  bool has_router_losses = false;

  ElementSizes element_sizes() const { return {element_bytes, accumulator_bytes}; }
  bool is_frozen() const { return adapter_elements > 0; }
  double linear_flops_per_token() const;  // forward, all layers and adapters, without the lm_head
  double last_flops_per_token() const;    // the part of each layer's last product (down)
  // The parts of these two that a token's experts compute. A product of an expert has fewer rows than the
  // pass.
  double expert_flops_per_token() const;
  double last_expert_flops_per_token() const;
  // Experts of a layer that at least one of `tokens` tokens uses, if all experts are used equally often.
  double distinct_experts(int64_t tokens) const;
  // Forward FLOPs of a fully trained model whose backward takes as long as this model's. With adapters this
  // is less than linear_flops_per_token(): backward of a frozen matrix skips one of its two products.
  double trained_linear_flops_per_token() const;
  double flops_per_pair() const;              // forward attention, all layers: q·k and p·v
  double scores_per_pair() const;             // exponentials, all layers
  double flops_per_head_row() const;          // forward, with the lm_head's adapter
  double trained_flops_per_head_row() const;  // as trained_linear_flops_per_token()
  // Elements that norms, rotary embedding, activations and residuals read or write, all layers.
  double elements_per_token() const;
  int64_t parameter_bytes() const;  // weights and their gradients
};

// Names: qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-14b (as in their config.json) and small (the shape
// in README's tables). dtype: fp32 | bf16 | fp64. Throws UserError if the name or the dtype is unknown.
ModelShape named_model_shape(std::string_view name, std::string_view dtype);

// dtype of weights and activations: fp32 | bf16 | fp64. Throws UserError if it is unknown.
ModelShape model_shape(const ModelConfig& config, std::string_view dtype);

WorkModel work_model(const ModelShape& shape);

// Sets element_bytes and accumulator_bytes. Throws UserError unless dtype is fp32 | bf16 | fp64.
void set_dtype(ModelShape& shape, std::string_view dtype);

// Bytes of a decoder's passes on a device with the given kernels, in addition to weights and gradients. The
// terms are those of PassCosts (plan/pass_costs.h). Shape and kernels must outlive this object.
class DecoderBytes {
 public:
  DecoderBytes(const ModelShape& shape, const DeviceKernels& kernels) : shape_(shape), kernels_(kernels) {}

  int64_t of_stack_row() const;
  int64_t of_kept(RecomputePolicy keep) const;  // one token
  // One token: bytes that RecomputePolicy::kLayerInputsOnHost copies to the host, and later back.
  int64_t copied_to_host() const;
  int64_t of_exit() const;  // PassCosts::boundary_bytes()
  int64_t of_loss_row() const;
  int64_t of_temporaries(const PassShape& pass, RecomputePolicy keep) const;

 private:
  enum class LayerKind { kDense, kSparse };
  std::vector<LayerKind> kinds() const;  // those that the model has
  // Bytes that autograd holds per token. of_layer: one layer with its input, without attention. of_layers:
  // all of them. of_feed_forward: the part of of_layer() that is freed before attention's backward, except
  // for the residual. of_attention: attention's output and log-sum-exp, one layer. of_pass: everything
  // outside the layers.
  int64_t of_layer(LayerKind kind) const;
  int64_t of_layers() const;
  int64_t of_feed_forward(LayerKind kind) const;
  int64_t of_layer_input() const { return shape_.hidden_size * shape_.element_bytes; }
  int64_t of_attention() const;
  int64_t of_pass() const;
  int64_t of_head(const PassShape& pass) const;
  int64_t of_head_adapter(int64_t rows) const;
  int64_t of_mlp(int64_t tokens) const;
  int64_t of_experts(int64_t tokens) const;
  int64_t of_attention_backward(const PassShape& pass, LayerKind kind) const;
  int64_t product(int64_t rows, int64_t depth, int64_t columns) const;
  int64_t weight_gradient(int64_t tokens, int64_t outputs, int64_t inputs) const;

  const ModelShape& shape_;
  const DeviceKernels& kernels_;
};

}  // namespace bough

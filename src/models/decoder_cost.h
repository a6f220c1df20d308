// What a pass through a decoder costs, from shapes alone: FLOPs, and bytes that follow the life of every
// tensor in models/decoder.cpp and train/head.cpp, with the temporaries that each kernel's own cost says of
// it. Whoever changes what a pass keeps changes of_kept() or of_temporaries() too, or
// cost/peak_memory_test.cpp fails. No torch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/common/device_kernels.h"
#include "models/config.h"
#include "plan/pass_costs.h"
#include "tree/prefix_tree.h"

namespace bough {

// A decoder and the sizes of its numbers. FLOPs count a multiply-add as two.
struct ModelShape : ModelConfig {
  std::string name;
  int64_t element_bytes = 4;      // of weights and activations
  int64_t accumulator_bytes = 4;  // of gradients, softmax, norms
  // Of adapters (models/lora.h), all layers. Where there are any, nothing else is trained.
  int64_t adapter_elements = 0;

  ElementSizes element_sizes() const { return {element_bytes, accumulator_bytes}; }
  bool is_frozen() const { return adapter_elements > 0; }
  double linear_flops_per_token() const;  // forward, all layers and adapters, without the head
  double last_flops_per_token() const;    // of these, those of the layers' last products (down)
  // The FLOPs whose backward, at that of a trained matrix, takes as long: half of the products are left out
  // where a matrix is frozen.
  double trained_linear_flops_per_token() const;
  double flops_per_pair() const;      // forward attention, all layers: q·k and p·v
  double scores_per_pair() const;     // exponentials, all layers
  double flops_per_head_row() const;  // forward
  // Elements that norms, rotary embedding, activations and residuals of all layers read or write.
  double elements_per_token() const;
  int64_t parameter_bytes() const;  // weights and their gradients
};

// Names are qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-14b (their config.json) and small (the shape
// that README's tables measure). dtype fp32 | bf16 | fp64. UserError lists the names.
ModelShape named_model_shape(std::string_view name, std::string_view dtype);

// dtype: fp32 | bf16 | fp64, of weights and activations.
ModelShape model_shape(const ModelConfig& config, std::string_view dtype);

WorkModel work_model(const ModelShape& shape);

// Sets the bytes of an element and of an accumulator; UserError unless fp32 | bf16 | fp64.
void set_dtype(ModelShape& shape, std::string_view dtype);

// Bytes of a decoder's passes over weights and gradients on a device with the given kernels, in the terms of
// PassCosts (plan/pass_costs.h).
class DecoderBytes {
 public:
  DecoderBytes(const ModelShape& shape, const DeviceKernels& kernels) : shape_(shape), kernels_(kernels) {}

  int64_t of_stack_row() const;
  int64_t of_kept(Keep keep) const;  // of one token
  // Of one token: what Keep::kLayerInputsOnHost copies to the host, and back again.
  int64_t copied_to_host() const;
  int64_t of_exit() const;
  int64_t of_loss_row() const;
  int64_t of_temporaries(const PassShape& pass, Keep keep) const;

 private:
  // What autograd keeps of one token: of a layer, with its input, without attention; of attention, its output
  // and log-sum-exp, a layer; beside the layers.
  int64_t of_layer() const;
  int64_t of_layer_input() const { return shape_.hidden_size * shape_.element_bytes; }
  int64_t of_attention() const;
  int64_t of_pass() const;
  int64_t of_head(const PassShape& pass) const;
  int64_t of_mlp(int64_t tokens) const;
  int64_t of_attention_backward(const PassShape& pass) const;
  int64_t product(int64_t rows, int64_t depth, int64_t columns) const;
  int64_t weight_gradient(int64_t tokens, int64_t outputs, int64_t inputs) const;

  const ModelShape& shape_;
  const DeviceKernels& kernels_;
};

}  // namespace bough

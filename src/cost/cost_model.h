// What a pass through a model costs on a device: seconds and bytes, from shapes alone (engine.md 2, "simulate").
//
// Seconds of a pass are the sum of four parts, each a curve of the device (device_profile.h) times the model's units
// of work: the matrix products of the layers (FLOPs), attention (FLOPs of what its busiest thread computes, which is more
// than the pairs that are visible: attention_work.h), everything elementwise (elements read and written) and the head (FLOPs, chunk by
// chunk); beside them a constant a layer and a pass. Where launches run ahead of the device (a GPU) the constants
// are hidden behind the work, and the larger of the two counts.
//
// Bytes follow the life of every tensor in models/decoder.cpp, train/head.cpp and kernels/*: whoever changes what a
// pass keeps changes activation_bytes() or temporary_bytes() too, or cost/peak_memory_test.cpp fails.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cost/device_profile.h"
#include "plan/pass_costs.h"
#include "tree/prefix_tree.h"

namespace bough {

// Sizes of a decoder, as far as its costs depend on them. FLOPs count a multiply-add as two.
struct ModelShape {
  std::string name;
  int64_t num_layers = 0;         // L
  int64_t hidden_size = 0;        // D
  int64_t intermediate_size = 0;  // F
  int64_t num_heads = 0;          // N
  int64_t num_kv_heads = 0;       // G
  int64_t head_dim = 0;           // H
  int64_t vocab_size = 0;         // V
  bool tied_head = false;         // the head is the embedding
  bool qk_norm = true;            // norms of head_dim on queries and keys
  bool qkv_bias = false, output_bias = false;
  int64_t element_bytes = 4;      // of weights and activations
  int64_t accumulator_bytes = 4;  // of gradients, softmax, norms

  int64_t query_width() const { return num_heads * head_dim; }
  int64_t key_width() const { return num_kv_heads * head_dim; }
  double linear_flops_per_token() const;  // forward, all layers, without the head
  double flops_per_pair() const;          // forward attention, all layers: q·k and p·v
  double scores_per_pair() const;         // exponentials, all layers
  double flops_per_head_row() const;      // forward
  // Read or written by norms, rotary embedding, SwiGLU, residuals, of all layers.
  double elements_per_token() const;
  int64_t num_parameters() const;
  int64_t parameter_bytes() const;  // weights and their gradients
};

// qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-14b (their config.json), small (the shape that README's tables
// measure). dtype fp32 | bf16 | fp64. UserError lists the names.
ModelShape named_model_shape(std::string_view name, std::string_view dtype);

WorkModel work_model(const ModelShape& shape);

// Bytes of an element and of an accumulator; UserError unless fp32 | bf16 | fp64.
void set_dtype(ModelShape& shape, std::string_view dtype);

class CostModel final : public PassCosts {
 public:
  // InternalError where profile and shape are of different element sizes.
  CostModel(DeviceProfile device, ModelShape shape);

  const DeviceProfile& device() const { return device_; }
  const ModelShape& shape() const { return shape_; }

  double forward_seconds(const PassShape& pass) const override;
  double backward_seconds(const PassShape& pass) const override;
  double attention_forward_seconds(const PassShape& pass) const override;
  double attention_backward_seconds(const PassShape& pass) const override;
  double head_forward_seconds(const PassShape& pass) const override;
  double head_backward_seconds(const PassShape& pass) const override;

  int64_t stack_row_bytes() const override;   // keys, values and their gradients of one token, all layers
  int64_t activation_bytes() const override;
  int64_t attention_bytes() const override;   // attention's outputs and log-sum-exps of one token, all layers
  int64_t exit_bytes() const override;        // a final hidden state that another block's head reads, and its gradient
  int64_t row_bytes() const override;
  int64_t temporary_bytes(const PassShape& pass) const override;

 private:
  double attention_seconds(const PassShape& pass, bool backward) const;
  double head_seconds(const CostCurve& curve, int64_t rows) const;
  int64_t tile_bytes(bool bf16, int64_t rows, int64_t depth, int64_t columns) const;
  int64_t product_bytes(int64_t rows, int64_t depth, int64_t columns) const;
  int64_t weight_gradient_bytes(int64_t tokens, int64_t outputs, int64_t inputs) const;
  int64_t head_temporary_bytes(const PassShape& pass) const;
  int64_t mlp_temporary_bytes(const PassShape& pass) const;
  int64_t attention_temporary_bytes(const PassShape& pass) const;

  DeviceProfile device_;
  ModelShape shape_;
};

}  // namespace bough

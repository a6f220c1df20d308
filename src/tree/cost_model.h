// What a pass through a model costs on a device: seconds and bytes, from shapes alone (engine.md 2, "simulate").
//
// Seconds of a pass are the sum of four parts, each a curve of the device (device_profile.h) times the model's units
// of work: the matrix products of the layers (FLOPs), attention (FLOPs of what its busiest thread computes, which is more
// than the pairs that are visible: attention_work.h), everything elementwise (elements read and written) and the head (FLOPs, chunk by
// chunk); beside them a constant a layer and a pass. Where launches run ahead of the device (a GPU) the constants
// are hidden behind the work, and the larger of the two counts.
//
// Bytes follow the life of every tensor in models/decoder.cpp, train/head.cpp and kernels/*: whoever changes what a
// pass keeps changes activation_bytes() or temporary_bytes() too, or train/peak_memory_test.cpp fails.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tree/device_profile.h"
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

// Of the forward pass. Backward is twice that for each term, so a step is kStepOverForward of them, and ratios of steps
// are ratios of these.
WorkModel work_model(const ModelShape& shape);
inline constexpr double kStepOverForward = 3;

// Bytes of an element and of an accumulator; UserError unless fp32 | bf16 | fp64.
void set_dtype(ModelShape& shape, std::string_view dtype);

// Rows of a chunk of logits where none are asked for: about 16 MiB in fp32, but enough for an efficient product.
int64_t head_chunk_rows(int64_t vocab_size);

// One pass through the model. What is left at its default is taken as of a block of one path.
struct PassShape {
  int64_t tokens = 0;
  int64_t stack_rows = 0;  // keys and values below it
  int64_t pairs = 0;       // visible (query, key) pairs
  int64_t head_rows = 0;   // rows of the head
  int64_t stack_pairs =
      -1;              // of `pairs`, those with a key on the stack; -1: every token sees the whole stack
  int64_t pieces = 1;  // runs of consecutive tokens, each the parent of the next
  int64_t loss_rows =
      -1;  // of the loss: more than head_rows where sequences share trained tokens; -1: as many
};

class CostModel {
 public:
  // InternalError where profile and shape are of different element sizes.
  CostModel(DeviceProfile device, ModelShape shape);

  const DeviceProfile& device() const { return device_; }
  const ModelShape& shape() const { return shape_; }

  // Through the layers, without the head. A pass of no tokens costs nothing.
  double forward_seconds(const PassShape& pass) const;
  double backward_seconds(const PassShape& pass) const;
  // The parts of those that are attention.
  double attention_forward_seconds(const PassShape& pass) const;
  double attention_backward_seconds(const PassShape& pass) const;
  double head_forward_seconds(const PassShape& pass) const;
  double head_backward_seconds(const PassShape& pass) const;

  // Bytes over weights and gradients. A pass with a graph takes tokens * activation_bytes() + temporary_bytes(), at
  // its peak, beside the stack and the exits and rows of the whole walk.
  int64_t stack_row_bytes() const;   // keys, values and their gradients of one token, all layers
  int64_t activation_bytes() const;  // what autograd keeps of one token, all layers
  int64_t attention_bytes() const;   // attention's outputs and log-sum-exps of one token, all layers
  int64_t exit_bytes() const;        // a final hidden state that another block's head reads, and its gradient
  int64_t row_bytes() const;  // of one row of the batch's loss: its fields and values, the whole walk long
  // In flight at once beside what is still alive of the activations: the largest of the head's chunk, the last
  // layer's MLP and its attention, backward. An upper bound; may be negative for a wide MLP, which frees its
  // activations before attention needs room.
  int64_t temporary_bytes(const PassShape& pass) const;

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

// What a pass through a model costs on a device: seconds and bytes, from shapes alone (engine.md 2, "simulate").
//
// A device is a DeviceProfile: curves of seconds per unit of work by the size of a pass, measured once
// (train/calibrate.h) or built in, and saved with a run as calibration.json, so that a plan is a function of the
// batch and that file. A CPU's cache likes passes of a few hundred tokens, a GPU thousands; every backward pass also
// reads and writes all parameter gradients: both show in the curves, neither is assumed here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

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
  int64_t element_bytes = 4;      // of weights and activations
  int64_t accumulator_bytes = 4;  // of gradients, softmax, norms

  int64_t query_width() const { return num_heads * head_dim; }
  int64_t key_width() const { return num_kv_heads * head_dim; }
  double linear_flops_per_token() const;  // forward, all layers, without the head
  double flops_per_pair() const;          // forward attention, all layers: q·k and p·v
  double flops_per_head_row() const;      // forward
  double elements_per_token()
      const;  // read or written by norms, rotary embedding, SwiGLU, residuals; all layers
  int64_t num_parameters() const;
};

// qwen3-0.6b, qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-14b, small (the yardstick's). dtype fp32 | bf16 | fp64.
// UserError lists the names.
ModelShape named_model_shape(std::string_view name, std::string_view dtype);

// Seconds of one unit of work in passes of so many tokens (or rows): linear between the measured sizes, constant
// below the first (a pass has a least price), proportional above the last.
struct CostCurve {
  std::vector<int64_t> sizes;   // ascending, at least one
  std::vector<double> seconds;  // of the whole pass, for one unit of work a token
  double at(int64_t size) const;
};

struct DeviceProfile {
  std::string name;    // "cpu", "h100"
  std::string source;  // where the rates come from
  std::string dtype;   // fp32 | bf16 | fp64
  int64_t memory_bytes = 0;
  // By tokens of the pass; a unit is one FLOP a token (of the forward pass; backward includes both products and the
  // accumulation into the gradients).
  CostCurve linear_forward, linear_backward;
  // By tokens of the pass; a unit is one element a token.
  CostCurve elementwise_forward, elementwise_backward;
  // By queries of the pass; a unit is one FLOP of the forward pass a query, of the pairs it sees.
  CostCurve attention_forward, attention_backward;
  // By rows of the head; a unit is one FLOP a row.
  CostCurve head_forward, head_backward;
  double seconds_per_layer_forward = 0;  // whatever the size: launches, autograd's nodes
  double seconds_per_layer_backward = 0;

  Json to_json() const;
  static DeviceProfile from_json(const Json& json, const std::string& where);  // UserError names the key
};

// h100, h200, a100: from published rates; `source` says which. UserError lists the names.
DeviceProfile built_in_profile(std::string_view name, std::string_view dtype);

// One pass through the model.
struct PassShape {
  int64_t tokens = 0;
  int64_t stack_rows = 0;  // keys and values below it
  int64_t pairs = 0;       // visible (query, key) pairs
  int64_t head_rows = 0;   // rows of the head and of the loss
};

class CostModel {
 public:
  CostModel(DeviceProfile device, ModelShape shape);

  const DeviceProfile& device() const { return device_; }
  const ModelShape& shape() const { return shape_; }

  // Through the layers, without the head.
  double forward_seconds(const PassShape& pass) const;
  double backward_seconds(const PassShape& pass) const;
  double attention_forward_seconds(
      const PassShape& pass) const;  // the part of forward_seconds that is attention
  double head_forward_seconds(const PassShape& pass) const;
  double head_backward_seconds(const PassShape& pass) const;

  // Bytes over weights and gradients.
  int64_t stack_row_bytes() const;   // keys, values and their gradients of one token, all layers
  int64_t activation_bytes() const;  // what autograd keeps of one token, all layers
  int64_t attention_bytes() const;   // attention's outputs and log-sum-exps of one token, all layers
  int64_t exit_bytes() const;        // a final hidden state that another block's head reads, and its gradient
  int64_t temporary_bytes(
      const PassShape& pass) const;  // in flight at once beside the activations; upper bound

 private:
  DeviceProfile device_;
  ModelShape shape_;
};

}  // namespace bough

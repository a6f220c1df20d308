// Keys, values and their gradients of the tokens on the current root-to-leaf chain of interior blocks, and the
// final hidden states that other blocks' heads read (engine.md 3, "Stack").
//
// One buffer a layer for k and v (model dtype) and one for each gradient (accumulator type), allocated once for the
// plan's deepest chain. Only the executor moves the top. Forward writes at the plan's offsets and is idempotent;
// gradient rows are zeroed when they are reserved, never by a recompute. Ops keep (stack, layer, offset, length),
// never views across passes: a view would trip autograd's version check when a sibling writes other rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "models/config.h"

namespace bough {

class KvStack {
 public:
  KvStack(const ModelConfig& config, int64_t capacity, at::ScalarType dtype, at::Device device,
          bool with_gradients);

  int64_t num_rows() const { return static_cast<int64_t>(tokens_.size()); }
  const std::vector<int32_t>& tokens() const {
    return tokens_;
  }  // tree tokens of the rows, one path from the root

  // Reserves rows for these tokens on top and zeroes their gradients.
  void push(int32_t first_token, int32_t end_token);
  void pop(int64_t num_rows);

  at::Tensor k(int64_t layer, int64_t begin, int64_t count) const {
    return k_[layer].narrow(0, begin, count);
  }
  at::Tensor v(int64_t layer, int64_t begin, int64_t count) const {
    return v_[layer].narrow(0, begin, count);
  }
  at::Tensor d_k(int64_t layer, int64_t begin, int64_t count) const {
    return d_k_[layer].narrow(0, begin, count);
  }
  at::Tensor d_v(int64_t layer, int64_t begin, int64_t count) const {
    return d_v_[layer].narrow(0, begin, count);
  }

 private:
  int64_t capacity_;
  std::vector<at::Tensor> k_, v_, d_k_, d_v_;  // [capacity, G, H] a layer
  std::vector<int32_t> tokens_;
};

}  // namespace bough

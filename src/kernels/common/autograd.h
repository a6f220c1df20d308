// Autograd names and helpers for our ops.
#pragma once

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

namespace bough {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Returns an empty tensor that requires a gradient, as an extra input of a graph's first op. Autograd does
// not track parameters, so token ids alone would give a graph without any input that requires a gradient, and
// nothing would be recorded.
inline at::Tensor graph_root(at::Device device) {
  return at::empty({0}, at::TensorOptions().dtype(at::kFloat).device(device)).requires_grad_(true);
}

}  // namespace bough

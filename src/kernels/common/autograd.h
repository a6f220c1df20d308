// What our ops need of libtorch's autograd.
#pragma once

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

namespace bough {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Parameters are not autograd inputs, so a graph that starts at token ids would have no input that asks for a
// gradient, and nothing would be recorded. This empty tensor asks.
inline at::Tensor graph_root(at::Device device) {
  return at::empty({0}, at::TensorOptions().dtype(at::kFloat).device(device)).requires_grad_(true);
}

}  // namespace bough

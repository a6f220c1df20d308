// What our ops need of libtorch's autograd.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

namespace bough {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Parameters are not autograd inputs, so a graph that starts at token ids would have no input that asks for a
// gradient, and nothing would be recorded. This empty tensor asks.
at::Tensor graph_root(at::Device device);

}  // namespace bough

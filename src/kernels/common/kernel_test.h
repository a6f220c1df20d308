// Helpers for kernel tests: random parameters, comparison by dtype, central differences in fp64.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <utility>
#include <vector>

#include "kernels/common/closeness.h"
#include "kernels/parameter.h"

namespace bough {

constexpr at::ScalarType kFloatTypes[] = {at::kFloat, at::kDouble, at::kBFloat16};

// Rows and widths for ops over rows. Some widths allow 16-byte packs, others do not. Some shapes have fewer
// rows than the first stage of a CUDA sum has parts, others more. In one shape, the sums of one row do not
// fit in the shared memory of a block.
inline const std::vector<std::pair<int64_t, int64_t>> kRowShapes = {
    {1, 5}, {3, 7}, {70, 5}, {65, 64}, {70, 130}, {130, 512}, {9000, 48}, {70, 1023}, {3, 16384}};

inline Parameter random_parameter(at::IntArrayRef sizes, at::ScalarType type, uint64_t seed) {
  Parameter parameter;
  parameter.value = random_tensor(sizes, type, seed);
  parameter.main_grad = at::zeros(sizes, at::TensorOptions().dtype(accumulator_type(type)));
  return parameter;
}

#define EXPECT_CLOSE(got, expected, type)                                                               \
  do {                                                                                                  \
    ASSERT_EQ((got).sizes(), (expected).sizes());                                                       \
    EXPECT_LE(::bough::relative_error(got, expected), ::bough::tolerance(type)) << c10::toString(type); \
  } while (0)

// Compares the gradient of sum(function(x) · w), with random w, to central differences. at_x is fp64.
inline void check_gradient(const std::function<at::Tensor(const at::Tensor&)>& function,
                           const at::Tensor& at_x) {
  auto x = at_x.detach().clone().requires_grad_(true);
  const auto y = function(x);
  const auto w = random_tensor(y.sizes(), at::kDouble, 99);
  y.backward(w);
  auto probe = at_x.detach().clone();
  const double step = 1e-5;
  auto flat = probe.view({-1});
  for (int64_t i = 0; i < flat.numel(); ++i) {
    const double value = flat[i].item<double>();
    flat[i] = value + step;
    const double above = (function(probe) * w).sum().item<double>();
    flat[i] = value - step;
    const double below = (function(probe) * w).sum().item<double>();
    flat[i] = value;
    const double numeric = (above - below) / (2 * step);
    ASSERT_NEAR(x.grad().view({-1})[i].item<double>(), numeric, 1e-7 * std::max(1.0, std::abs(numeric)))
        << "element " << i;
  }
}

inline void check_parameter_gradient(const std::function<at::Tensor()>& function, Parameter& parameter) {
  parameter.main_grad.zero_();
  const auto y = function();
  const auto w = random_tensor(y.sizes(), at::kDouble, 98);
  y.backward(w);
  const auto gradient = parameter.main_grad.clone();
  const double step = 1e-5;
  auto flat = parameter.value.view({-1});
  for (int64_t i = 0; i < flat.numel(); ++i) {
    const double value = flat[i].item<double>();
    flat[i] = value + step;
    const double above = (function().detach() * w).sum().item<double>();
    flat[i] = value - step;
    const double below = (function().detach() * w).sum().item<double>();
    flat[i] = value;
    const double numeric = (above - below) / (2 * step);
    ASSERT_NEAR(gradient.view({-1})[i].item<double>(), numeric, 1e-7 * std::max(1.0, std::abs(numeric)))
        << "element " << i;
  }
}

}  // namespace bough

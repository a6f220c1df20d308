// Helpers for kernel tests: random tensors, tolerances by dtype, central differences in fp64.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <utility>
#include <vector>

#include "kernels/parameter.h"

namespace bough {

constexpr at::ScalarType kFloatTypes[] = {at::kFloat, at::kDouble, at::kBFloat16};

// Rows and widths for ops over rows. Some widths allow 16-byte packs, others do not. Some shapes have fewer
// rows than the first stage of a CUDA sum has parts, others more. In one shape, the sums of one row do not
// fit in the shared memory of a block.
inline const std::vector<std::pair<int64_t, int64_t>> kRowShapes = {
    {1, 5}, {3, 7}, {70, 5}, {65, 64}, {70, 130}, {130, 512}, {9000, 48}, {70, 1023}, {3, 16384}};

inline at::Tensor random_tensor(at::IntArrayRef sizes, at::ScalarType type, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator, at::TensorOptions().dtype(at::kDouble)).to(type);
}

inline Parameter random_parameter(at::IntArrayRef sizes, at::ScalarType type, uint64_t seed) {
  Parameter parameter;
  parameter.value = random_tensor(sizes, type, seed);
  parameter.main_grad = at::zeros(sizes, at::TensorOptions().dtype(accumulator_type(type)));
  return parameter;
}

// Tolerance relative to the largest element: kernel and reference sum in different orders, so an element's
// error is bounded by the unit roundoff times the sum of its terms' sizes, not by the element's own. 64
// roundoffs cover the lengths the tests use (errors grow like the square root of the length). In bf16, 4 are
// enough, because sums are fp32 and only a few results are rounded.
inline double tolerance(at::ScalarType type) {
  return 64 * (type == at::kDouble ? 1.1e-16 : type == at::kFloat ? 6e-8 : 3.9e-3 / 16);
}

inline double relative_error(const at::Tensor& got, const at::Tensor& expected) {
  const auto reference = expected.detach().to(at::kDouble);
  const double scale =
      std::max(reference.numel() ? reference.abs().max().item<double>() : 0.0, 0.1);  // inputs are of order 1
  return got.numel() ? (got.detach().to(at::kDouble) - reference).abs().max().item<double>() / scale : 0.0;
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

// Random tensors, and tolerances by dtype, for tests of kernels and for the self-test.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>

namespace bough {

inline at::Tensor random_tensor(at::IntArrayRef sizes, at::ScalarType type, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator, at::TensorOptions().dtype(at::kDouble)).to(type);
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

}  // namespace bough

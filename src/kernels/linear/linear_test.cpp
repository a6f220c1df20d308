#include "kernels/linear/linear.h"

#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

TEST(Linear, BackwardIsTheDerivative) {
  Parameter weight = random_parameter({5, 4}, at::kDouble, 1), bias = random_parameter({5}, at::kDouble, 2);
  const auto x = random_tensor({3, 4}, at::kDouble, 3);
  check_gradient([&](const at::Tensor& input) { return linear(input, weight, &bias); }, x);
  const auto function = [&] { return linear(x.detach().requires_grad_(true), weight, &bias); };
  check_parameter_gradient(function, weight);
  check_parameter_gradient(function, bias);
}

TEST(Linear, AddsAResidualAndPassesItsGradientOn) {
  Parameter weight = random_parameter({5, 4}, at::kDouble, 1), bias = random_parameter({5}, at::kDouble, 2);
  const auto x = random_tensor({3, 4}, at::kDouble, 3), r = random_tensor({3, 5}, at::kDouble, 4);
  EXPECT_CLOSE(linear(x, weight, &bias, false, r), linear(x, weight, &bias) + r, at::kDouble);
  check_gradient([&](const at::Tensor& input) { return linear(input, weight, &bias, false, r); }, x);
  check_gradient([&](const at::Tensor& residual) { return linear(x, weight, &bias, false, residual); }, r);
}

// Sixty-four additions of 1/256 of the first one: a bf16 sum would stay where it was.
TEST(Linear, Bf16GradientsAccumulateInFp32) {
  Parameter weight = random_parameter({1, 1}, at::kBFloat16, 1);
  const auto backward = [&](double d_y) {
    auto x = at::ones({1, 1}, at::kBFloat16).requires_grad_(true);
    linear(x, weight).backward(at::full({1, 1}, d_y, at::kBFloat16));
  };
  backward(1.0);
  for (int i = 0; i < 64; ++i) backward(1.0 / 512);
  EXPECT_FLOAT_EQ(weight.main_grad.item<float>(), 1.125f);
}

}  // namespace
}  // namespace bough

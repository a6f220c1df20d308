#include "kernels/norm_linear/norm_linear.h"

#include "kernels/common/kernel_test.h"
#include "kernels/linear/linear.h"
#include "kernels/rms_norm/rms_norm.h"

namespace bough {
namespace {

constexpr double kEps = 1e-6;

struct Parts {
  Parameter norm, weight, bias;
  Parts(int64_t width, int64_t outputs, at::ScalarType type)
      : norm(random_parameter({width}, type, 1)),
        weight(random_parameter({outputs, width}, type, 2)),
        bias(random_parameter({outputs}, type, 3)) {}
  NormLinearOutput operator()(const at::Tensor& x) const { return norm_linear(x, norm, kEps, weight, &bias); }
};

TEST(NormLinear, IsTheTwoOpsWithOneBackward) {
  for (const auto type : kFloatTypes)
    for (const auto& [rows, width, outputs] : {std::tuple{1, 5, 3}, {70, 64, 96}, {130, 96, 33}}) {
      SCOPED_TRACE(testing::Message() << c10::toString(type) << " " << rows << " rows of " << width);
      const Parts one(width, outputs, type), two(width, outputs, type);
      auto x = random_tensor({rows, width}, type, 4).requires_grad_(true);
      auto x_two = x.detach().clone().requires_grad_(true);
      const auto d_y = random_tensor({rows, outputs}, type, 5), d_r = random_tensor({rows, width}, type, 6);
      const auto [y, residual] = one(x);
      const auto y_two = linear(rms_norm(x_two, two.norm, kEps), two.weight, &two.bias);
      EXPECT_TRUE(at::equal(y, y_two));
      EXPECT_TRUE(at::equal(residual, x));
      torch::autograd::backward({y, residual}, {d_y, d_r});
      torch::autograd::backward({y_two, x_two}, {d_y, d_r});
      EXPECT_CLOSE(x.grad(), x_two.grad(), type);
      EXPECT_CLOSE(one.norm.main_grad, two.norm.main_grad, type);
      EXPECT_TRUE(at::equal(one.weight.main_grad, two.weight.main_grad)) << "h again has other bits";
      EXPECT_CLOSE(one.bias.main_grad, two.bias.main_grad, type);
    }
}

TEST(NormLinear, BackwardIsTheDerivative) {
  Parts f(6, 5, at::kDouble);
  const auto x = random_tensor({4, 6}, at::kDouble, 4);
  check_gradient([&](const at::Tensor& input) { return f(input).y_RO; }, x);
  check_gradient(
      [&](const at::Tensor& input) {
        const auto [y, residual] = f(input);
        return at::cat({y, residual}, 1);
      },
      x);
  check_gradient([&](const at::Tensor& input) { return f(input).residual_RD * 2; }, x);
  for (Parameter* parameter : {&f.norm, &f.weight, &f.bias})
    check_parameter_gradient([&] { return f(x.detach().requires_grad_(true)).y_RO; }, *parameter);
}

}  // namespace
}  // namespace bough

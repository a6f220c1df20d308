#include "kernels/rms_norm/rms_norm.h"

#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

TEST(RmsNorm, MatchesReferenceInEveryDtype) {
  for (const auto type : kFloatTypes)
    for (const auto& [rows, width, offset] : std::vector<std::tuple<int64_t, int64_t, double>>{
             {1, 5, 0}, {3, 7, 1}, {65, 64, 0}, {65, 64, 1}, {130, 512, 0}}) {
      const NormSettings norm{1e-6, offset};
      auto x = random_tensor({rows, width}, type, 1);
      Parameter weight = random_parameter({width}, type, 2);
      const auto d_y = random_tensor({rows, width}, type, 3);
      x.requires_grad_(true);
      const auto y = rms_norm(x, weight, norm);
      y.backward(d_y);
      const auto [y_ref, rstd] = rms_norm_forward_reference(x.detach(), weight.value, norm);
      auto d_weight = at::zeros_like(weight.main_grad);
      const auto d_x_ref =
          rms_norm_backward_reference({d_y, x.detach(), weight.value, rstd, {}, d_weight, {}, offset});
      EXPECT_CLOSE(y, y_ref, type);
      EXPECT_CLOSE(x.grad(), d_x_ref, type);
      EXPECT_CLOSE(weight.main_grad, d_weight, type);
    }
}

// Backward recomputes the output in d_y's memory, as sublayers request it.
TEST(RmsNorm, BackwardAddsTheResidualsAndComputesTheOutputAgain) {
  for (const auto type : kFloatTypes)
    for (const int64_t width : {5, 64, 130}) {
      const double offset = width == 130 ? 0 : 1;
      const auto x = random_tensor({70, width}, type, 1), residual = random_tensor({70, width}, type, 4);
      const auto d_y = random_tensor({70, width}, type, 3);
      const Parameter weight = random_parameter({width}, type, 2);
      const auto [y, rstd] = rms_norm_forward(x, weight.value, {1e-6, offset});
      auto d_weight = at::zeros_like(weight.main_grad);
      const auto y_ref = at::empty_like(x);
      const auto d_x_ref =
          rms_norm_backward_reference({d_y, x, weight.value, rstd, residual, d_weight, y_ref, offset});
      const auto in_place = d_y.clone();
      const auto d_x =
          rms_norm_backward({in_place, x, weight.value, rstd, residual, weight.main_grad, in_place, offset});
      EXPECT_CLOSE(d_x, d_x_ref, type);
      EXPECT_CLOSE(weight.main_grad, d_weight, type);
      EXPECT_CLOSE(in_place, y_ref, type);
      EXPECT_TRUE(at::equal(in_place, y));
    }
}

TEST(RmsNorm, BackwardIsTheDerivative) {
  const auto x = random_tensor({4, 6}, at::kDouble, 1);
  Parameter weight = random_parameter({6}, at::kDouble, 2);
  for (const double offset : {0, 1}) {
    const NormSettings norm{1e-6, offset};
    check_gradient([&](const at::Tensor& input) { return rms_norm(input, weight, norm); }, x);
    check_parameter_gradient([&] { return rms_norm(x.detach().requires_grad_(true), weight, norm); }, weight);
  }
}

TEST(RmsNorm, GradientsAccumulate) {
  const auto x = random_tensor({4, 6}, at::kDouble, 1);
  Parameter weight = random_parameter({6}, at::kDouble, 2);
  rms_norm(x.detach().requires_grad_(true), weight, 1e-6).sum().backward();
  const auto once = weight.main_grad.clone();
  rms_norm(x.detach().requires_grad_(true), weight, 1e-6).sum().backward();
  EXPECT_TRUE(at::allclose(weight.main_grad, 2 * once, 1e-12, 1e-12));
}

}  // namespace
}  // namespace bough

#include "kernels/rms_norm/rms_norm.h"

#include "kernels/common/device_test.h"
#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

class RmsNormOn : public OnDevice {};
BOUGH_ON_DEVICES(RmsNormOn);

TEST_P(RmsNormOn, MatchesReferenceInEveryDtype) {
  for (const auto type : kFloatTypes)
    for (const auto& [rows, width] : kRowShapes)
      for (const double offset : {0, 1}) {
        const NormSettings norm{1e-6, offset};
        const auto x = random_tensor({rows, width}, type, 1), d_y = random_tensor({rows, width}, type, 3);
        const Parameter weight = random_parameter({width}, type, 2);
        const auto [y_ref, rstd] = rms_norm_forward_reference(x, weight.value, norm);
        auto d_weight_ref = weight.main_grad.clone();
        const auto d_x_ref =
            rms_norm_backward_reference({d_y, x, weight.value, rstd, {}, d_weight_ref, {}, offset});
        std::vector<at::Tensor> d_weights;
        for (int run = 0; run < 2; ++run) {
          const Parameter parameter = copy_to(device(), weight);
          auto input = copy_to(device(), x).requires_grad_(true);
          const auto y = rms_norm(input, parameter, norm);
          y.backward(copy_to(device(), d_y));
          EXPECT_CLOSE(y.cpu(), y_ref, type);
          EXPECT_CLOSE(input.grad().cpu(), d_x_ref, type);
          EXPECT_CLOSE(parameter.main_grad.cpu(), d_weight_ref, type);
          d_weights.push_back(parameter.main_grad);
        }
        EXPECT_SAME_BITS(d_weights[0], d_weights[1]);
      }
}

// Backward recomputes the output in d_y's memory, as sublayers request it.
TEST_P(RmsNormOn, BackwardAddsTheResidualsAndComputesTheOutputAgain) {
  for (const auto type : kFloatTypes)
    for (const auto& [rows, width] : kRowShapes)
      for (const double offset : {0, 1}) {
        const auto x = random_tensor({rows, width}, type, 1),
                   residual = random_tensor({rows, width}, type, 4),
                   d_y = random_tensor({rows, width}, type, 3);
        const Parameter weight = random_parameter({width}, type, 2), parameter = copy_to(device(), weight);
        const auto input = copy_to(device(), x);
        const auto [y, rstd] = rms_norm_forward(input, parameter.value, {1e-6, offset});
        auto d_weight_ref = at::zeros_like(weight.main_grad);
        const auto y_ref = at::empty_like(x);
        const auto d_x_ref = rms_norm_backward_reference(
            {d_y, x, weight.value, rstd.cpu(), residual, d_weight_ref, y_ref, offset});
        const auto in_place = copy_to(device(), d_y);
        const auto d_x =
            rms_norm_backward({in_place, input, parameter.value, rstd, copy_to(device(), residual),
                               parameter.main_grad, in_place, offset});
        EXPECT_CLOSE(d_x.cpu(), d_x_ref, type);
        EXPECT_CLOSE(parameter.main_grad.cpu(), d_weight_ref, type);
        EXPECT_CLOSE(in_place.cpu(), y_ref, type);
        if (!device().is_cpu()) continue;
        EXPECT_SAME_BITS(in_place, y);
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

using CudaRmsNorm = OnCuda;

// If a tensor was left on the host, the op throws an error that names the tensor. The device does not read
// the tensor.
TEST_F(CudaRmsNorm, TensorsOfTwoDevicesAreRefused) {
  const auto x = on_gpu(random_tensor({4, 8}, at::kFloat, 1));
  EXPECT_THROW(rms_norm(x, random_parameter({8}, at::kFloat, 2), 1e-6), InternalError);
}

BOUGH_HAS_CUDA_KERNELS(RmsNorm, "rms_norm_forward", "rms_norm_backward")

}  // namespace
}  // namespace bough

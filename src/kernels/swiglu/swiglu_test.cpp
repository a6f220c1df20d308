#include "kernels/swiglu/swiglu.h"

#include <torch/csrc/autograd/custom_function.h>

#include "kernels/common/device_test.h"
#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

constexpr GateActivation kActivations[] = {GateActivation::kSilu, GateActivation::kGeluTanh};

class SwigluOn : public OnDevice {};
BOUGH_ON_DEVICES(SwigluOn);

TEST_P(SwigluOn, MatchesReferenceInEveryDtype) {
  auto shapes = kRowShapes;
  shapes.insert(shapes.end(), {{37, 1}, {37, 15}});
  for (const auto activation : kActivations)
    for (const auto type : kFloatTypes)
      for (const auto& [rows, width] : shapes) {
        SCOPED_TRACE(testing::Message()
                     << "activation " << static_cast<int>(activation) << " width " << width);
        const auto x = random_tensor({rows, 2 * width}, type, 1) * 5;
        const auto d_y = random_tensor({rows, width}, type, 2);
        const auto y_ref = at::empty_like(d_y), d_x_ref = at::empty_like(x);
        swiglu_backward_reference(d_y, x, y_ref, d_x_ref, activation);
        const auto input = copy_to(device(), x), d_output = copy_to(device(), d_y);
        EXPECT_CLOSE(swiglu_forward(input, activation).cpu(), y_ref, type);
        const auto y = at::empty_like(d_output), d_x = at::empty_like(input);
        swiglu_backward(d_output, input, y, d_x, activation);
        EXPECT_CLOSE(y.cpu(), y_ref, type);
        EXPECT_CLOSE(d_x.cpu(), d_x_ref, type);
        swiglu_backward(d_output, input, d_output, input, activation);  // in place
        EXPECT_SAME_BITS(d_output, y);
        EXPECT_SAME_BITS(input, d_x);
      }
}

TEST(Swiglu, IsLibtorchsSiluAndGelu) {
  const auto x = random_tensor({5, 14}, at::kDouble, 1) * 2;
  const auto parts = x.chunk(2, 1);
  EXPECT_CLOSE(swiglu_forward(x), at::silu(parts[0]) * parts[1], at::kDouble);
  EXPECT_CLOSE(swiglu_forward(x, GateActivation::kGeluTanh), at::gelu(parts[0], "tanh") * parts[1],
               at::kDouble);
}

TEST(Swiglu, GatesFarFromZero) {
  for (const auto activation : kActivations)
    for (const auto type : kFloatTypes) {
      // The gates are repeated to fill the vectors of every implementation.
      const auto gate = at::tensor({-300.0, -90.0, -87.0, -30.0, -1e-30, 0.0, 30.0, 87.0, 90.0, 300.0})
                            .to(type)
                            .repeat({16});
      const auto x = at::cat({gate, at::full_like(gate, 2)}).unsqueeze(0),
                 d_y = at::ones_like(gate).unsqueeze(0);
      const auto y = at::empty_like(d_y), y_ref = at::empty_like(d_y), d_x = at::empty_like(x),
                 d_x_ref = at::empty_like(x);
      swiglu_backward_reference(d_y, x, y_ref, d_x_ref, activation);
      swiglu_backward(d_y, x, y, d_x, activation);
      EXPECT_CLOSE(swiglu_forward(x, activation), y_ref, type);
      EXPECT_CLOSE(y, y_ref, type);
      EXPECT_CLOSE(d_x, d_x_ref, type);
      const auto nan = at::full({1, 64}, NAN, x.options());
      EXPECT_TRUE(swiglu_forward(nan, activation).isnan().all().item<bool>());
    }
}

TEST(Swiglu, BackwardInTheMemoryOfItsInputs) {
  for (const auto type : kFloatTypes)
    for (const int64_t width : {45, 64}) {
      const auto x = random_tensor({37, 2 * width}, type, 1), d_y = random_tensor({37, width}, type, 2);
      const auto y = at::empty_like(d_y), d_x = at::empty_like(x);
      swiglu_backward(d_y, x, y, d_x);
      swiglu_backward(d_y, x, d_y, x);
      EXPECT_TRUE(at::equal(d_y, y));
      EXPECT_TRUE(at::equal(x, d_x));
    }
}

// Backward's d_gate_up for random weights of y is compared with central differences.
TEST(Swiglu, BackwardIsTheDerivative) {
  struct Function : torch::autograd::Function<Function> {
    static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                              GateActivation activation) {
      context->save_for_backward({x});
      context->saved_data["activation"] = static_cast<int64_t>(activation);
      return swiglu_forward(x, activation);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   torch::autograd::variable_list d_outputs) {
      const auto x = context->get_saved_variables()[0];
      auto d_x = at::empty_like(x);
      swiglu_backward(d_outputs[0], x, at::empty_like(d_outputs[0]), d_x,
                      static_cast<GateActivation>(context->saved_data["activation"].toInt()));
      return {d_x, {}};
    }
  };
  for (const auto activation : kActivations)
    check_gradient([&](const at::Tensor& x) { return Function::apply(x, activation); },
                   random_tensor({3, 8}, at::kDouble, 1));
}

BOUGH_HAS_CUDA_KERNELS(Swiglu, "swiglu_forward", "swiglu_backward")

}  // namespace
}  // namespace bough

#include "kernels/experts/experts.h"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "kernels/common/isa.h"
#include "kernels/experts/experts_test_util.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/quantized_product/quantized_product.h"

namespace bough {
namespace {

TEST(Experts, EqualTheSublayerInFp64) {
  for (const auto type : kFloatTypes)
    for (const auto& [tokens, experts, chosen, width, inner] :
         {std::tuple{1, 4, 2, 5, 3}, {3, 8, 1, 64, 96}, {70, 8, 2, 96, 33}, {300, 16, 4, 64, 32}})
      for (const int variant : {0, 1, 2}) {
        SCOPED_TRACE(testing::Message() << c10::toString(type) << " " << tokens << " tokens, " << experts
                                        << " experts, variant " << variant);
        Mixture f(experts, chosen, width, inner, type);
        f.renormalise = variant != 1;
        f.has_norm = f.residual = variant != 2;
        f.activation = variant == 2 ? GateActivation::kGeluTanh : GateActivation::kSilu;
        auto x = random_tensor({tokens, width}, type, 5).requires_grad_(true);
        const auto d_y = random_tensor({tokens, width}, type, 6);
        const auto chosen_TK = choose_experts(f.logits(x), chosen);
        const ExpectedMixture expected(f, x, chosen_TK, d_y);
        const auto y = f.run(x, chosen_TK);
        EXPECT_LE(relative_error(y, expected.y), mixture_bound(type));
        y.backward(d_y);
        EXPECT_LE(relative_error(x.grad(), expected.d_x), mixture_bound(type));
        const auto parameters = f.parameters();
        for (size_t i = f.has_norm ? 0 : 1; i < parameters.size(); ++i)
          EXPECT_LE(relative_error(parameters[i]->main_grad, expected.gradients[i]), mixture_bound(type))
              << i;
      }
}

// Without backward, threads compute experts of few rows beside each other, and then the rest together.
TEST(Experts, FewRowsWithoutBackwardEqualTheSublayer) {
  const int threads = at::get_num_threads();
  at::set_num_threads(2);
  for (const auto type : kFloatTypes)
    for (const int64_t experts : {5, 6, 1}) {
      const Mixture f(experts, std::min<int64_t>(2, experts), 96, 32, type);
      const auto x = random_tensor({20, 96}, type, 5), d_y = random_tensor({20, 96}, type, 6);
      const auto chosen_TK = choose_experts(f.logits(x), f.num_chosen);
      const ExpectedMixture expected(f, x, chosen_TK, d_y);
      const at::NoGradGuard no_grad;
      EXPECT_LE(relative_error(f.run(x, chosen_TK), expected.y), mixture_bound(type)) << experts;
    }
  at::set_num_threads(threads);
}

TEST(Experts, BackwardIsTheDerivative) {
  for (const bool renormalise : {true, false}) {
    Mixture f(4, 2, 5, 3, at::kDouble);
    f.renormalise = renormalise;
    const auto x = random_tensor({4, 5}, at::kDouble, 5);
    check_gradient([&](const at::Tensor& input) { return f(input); }, x);
    for (Parameter* parameter : f.parameters())
      check_parameter_gradient([&] { return f(x.detach().requires_grad_(true)); }, *parameter);
  }
}

// Experts that the router would not choose: the gradient is that of the function with these experts.
TEST(Experts, BackwardOfRecordedExpertsIsTheDerivative) {
  Mixture f(5, 2, 5, 3, at::kDouble);
  const auto x = random_tensor({3, 5}, at::kDouble, 5);
  const auto recorded = at::tensor({4, 0, 1, 2, 3, 4}, at::kLong).view({3, 2});
  EXPECT_FALSE(at::equal(recorded, choose_experts(f.logits(x), 2)));
  check_gradient([&](const at::Tensor& input) { return f.run(input, recorded); }, x);
  check_parameter_gradient([&] { return f.run(x.detach().requires_grad_(true), recorded); }, f.router);
}

TEST(Experts, ChooseTheLargestLogits) {
  const auto logits = at::tensor({0.5, 3.0, -1.0, 2.0, 4.0, 1.0, 0.0, -2.0}, at::kDouble).view({2, 4});
  EXPECT_TRUE(at::equal(choose_experts(logits, 2), at::tensor({1, 3, 0, 1}, at::kLong).view({2, 2})));
}

TEST(Experts, WithoutTheOutputBackwardIsTheSame) {
  Mixture with(8, 2, 64, 32, at::kFloat), without(8, 2, 64, 32, at::kFloat);
  auto x = random_tensor({20, 64}, at::kFloat, 5).requires_grad_(true);
  auto x_without = x.detach().clone().requires_grad_(true);
  const auto d_y = random_tensor({20, 64}, at::kFloat, 6);
  const auto experts_TK = choose_experts(with.logits(x), 2);
  with.run(x, experts_TK).backward(d_y);
  const auto y = without.run(x_without, experts_TK, /*output_is_read=*/false);
  EXPECT_EQ(y.abs().max().item<double>(), 0);
  y.backward(d_y);
  EXPECT_TRUE(at::equal(x.grad(), x_without.grad()));
  const auto all = with.parameters(), others = without.parameters();
  for (size_t i = 0; i < all.size(); ++i)
    EXPECT_TRUE(at::equal(all[i]->main_grad, others[i]->main_grad)) << i;
}

TEST(Experts, AFrozenMatrixGetsNoGradient) {
  Mixture f(4, 2, 8, 4, at::kFloat);
  for (Parameter* parameter : f.parameters()) parameter->main_grad.reset();
  auto x = random_tensor({3, 8}, at::kFloat, 5).requires_grad_(true);
  f(x).sum().backward();
  EXPECT_GT(x.grad().abs().max().item<double>(), 0);
}

TEST(Experts, ExpertsWithoutTokensAreNotRead) {
  Mixture f(4, 1, 8, 4, at::kFloat);
  const auto x = random_tensor({3, 8}, at::kFloat, 5);
  const auto experts_TK = at::tensor({2, 0, 2}, at::kLong).view({3, 1});
  const auto y = f.run(x, experts_TK);
  for (const int64_t unused : {1, 3}) {
    f.gate_up.value.narrow(0, unused * 8, 8).fill_(NAN);
    f.down.value.narrow(0, unused * 8, 8).fill_(NAN);
  }
  EXPECT_TRUE(at::equal(f.run(x, experts_TK), y));
}

TEST(Experts, QuantizedExpertsEqualTheirWeights) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const c10::AutoGradMode no_grad(false);
    Mixture f(8, 2, 64, 32, type);
    const auto x = random_tensor({30, 64}, type, 5);
    const auto experts_TK = choose_experts(f.logits(x), 2);
    Mixture exact(8, 2, 64, 32, type);
    for (const auto& [matrix, plain] : {std::pair{&f.gate_up, &exact.gate_up}, {&f.down, &exact.down}}) {
      const auto quantized = at::empty(matrix->value.sizes(), at::kChar);
      matrix->scale = at::empty({matrix->value.size(0)}, at::kFloat);
      quantize_rows_(quantized, matrix->scale, matrix->value);
      matrix->value = quantized;
      plain->value = (quantized.to(at::kDouble) * matrix->scale.to(at::kDouble).unsqueeze(1)).to(type);
    }
    // In bf16 the plain weights are rounded once more.
    EXPECT_LE(relative_error(f.run(x, experts_TK), exact.run(x, experts_TK)), mixture_bound(type));
  }
}

TEST(Experts, BatchInvariantRowsDoNotDependOnOthers) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    if (!has_tiles(type)) GTEST_SKIP() << "needs our kernels for " << c10::toString(type);
    const c10::AutoGradMode no_grad(false);
    const Mixture f(8, 2, 64, 32, type);
    const auto x = random_tensor({50, 64}, type, 5);
    const auto run = [&](const at::Tensor& some) {
      return f.run(some, choose_experts(f.logits(some, true), 2), true, true);
    };
    const auto together = run(x);
    for (const int64_t t : {0, 17, 49})
      EXPECT_TRUE(at::equal(run(x.narrow(0, t, 1).contiguous()), together.narrow(0, t, 1))) << t;
  }
}

TEST(Experts, ASecondBackwardIsRefused) {
  const Mixture f(4, 2, 8, 4, at::kFloat);
  const auto y = f(random_tensor({3, 8}, at::kFloat, 5).requires_grad_(true));
  const auto d_y = at::ones_like(y);
  y.backward(d_y, /*retain_graph=*/true);
  EXPECT_THROW(y.backward(d_y), std::exception);
}

TEST(Experts, NoTokens) {
  const Mixture f(4, 2, 8, 4, at::kFloat);
  EXPECT_EQ(f(at::empty({0, 8})).size(0), 0);
}

TEST(Experts, WrongIndicesAreRefused) {
  const Mixture f(4, 2, 8, 4, at::kFloat);
  const auto x = random_tensor({1, 8}, at::kFloat, 5);
  const auto weights = at::ones({1, 2});
  const auto run = [&](std::vector<int64_t> indices) {
    return experts_mlp(x, at::tensor(indices, at::kLong).view({1, 2}), weights,
                       {.norm = &f.norm, .gate_up = f.gate_up, .down = f.down, .norm_settings = kNormEps});
  };
  EXPECT_NO_THROW(run({3, 0}));
  EXPECT_THROW(run({4, 0}), std::exception);
  EXPECT_THROW(run({-1, 0}), std::exception);
  EXPECT_THROW(run({2, 2}), std::exception);
}

}  // namespace
}  // namespace bough

#include "kernels/adamw/adamw.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/common/device_test.h"
#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

AdamwState random_state(at::IntArrayRef sizes, at::ScalarType type, uint64_t seed) {
  const auto acc = accumulator_type(type);
  AdamwState state;
  state.value = random_tensor(sizes, type, seed);
  if (acc != type) state.master = random_tensor(sizes, acc, seed);
  state.exp_avg = random_tensor(sizes, acc, seed + 1);
  state.exp_avg_sq = random_tensor(sizes, acc, seed + 2).square();
  state.gradient = random_tensor(sizes, acc, seed + 3);
  return state;
}

AdamwState copy(const AdamwState& state, at::Device device = at::kCPU) {
  return {copy_to(device, state.value), copy_to(device, state.master), copy_to(device, state.exp_avg),
          copy_to(device, state.exp_avg_sq), copy_to(device, state.gradient)};
}

constexpr AdamwStep kStep{.lr = 0.01,
                          .beta1 = 0.9,
                          .beta2 = 0.99,
                          .eps = 1e-8,
                          .weight_decay = 0.1,
                          .gradient_scale = 0.7,
                          .step = 3};

class AdamwOn : public OnDevice {};
BOUGH_ON_DEVICES(AdamwOn);

TEST_P(AdamwOn, MatchesReferenceInEveryDtype) {
  for (const auto type : kFloatTypes)
    for (const int64_t size : {1, 17, 40'000}) {
      const auto expected = random_state({size}, type, 1), got = copy(expected, device());
      adamw(got, kStep);
      adamw_reference(expected, kStep);
      const auto acc = accumulator_type(type);
      EXPECT_CLOSE(got.exp_avg.cpu(), expected.exp_avg, acc);
      EXPECT_CLOSE(got.exp_avg_sq.cpu(), expected.exp_avg_sq, acc);
      EXPECT_CLOSE(got.value.cpu(), expected.value, type);
      EXPECT_EQ(got.gradient.count_nonzero().item<int64_t>(), 0);
      if (type == acc) continue;
      EXPECT_CLOSE(got.master.cpu(), expected.master, acc);
      EXPECT_TRUE(got.value.equal(got.master.to(type)));
    }
}

// The expected values follow the header's formula in plain fp64, element by element.
TEST(Adamw, ReferenceFollowsTheFormula) {
  auto state = random_state({64}, at::kDouble, 5);
  const auto before = copy(state);
  adamw_reference(state, kStep);
  for (int64_t i = 0; i < 64; ++i) {
    const double g = before.gradient[i].item<double>() * kStep.gradient_scale;
    const double m = kStep.beta1 * before.exp_avg[i].item<double>() + (1 - kStep.beta1) * g;
    const double v = kStep.beta2 * before.exp_avg_sq[i].item<double>() + (1 - kStep.beta2) * g * g;
    const double m_hat = m / (1 - kStep.beta1 * kStep.beta1 * kStep.beta1);
    const double v_hat = v / (1 - kStep.beta2 * kStep.beta2 * kStep.beta2);
    const double w = before.value[i].item<double>() * (1 - kStep.lr * kStep.weight_decay) -
                     kStep.lr * m_hat / (std::sqrt(v_hat) + kStep.eps);
    EXPECT_NEAR(state.value[i].item<double>(), w, 1e-14);
  }
}

// Second moments range from zero over denormal to huge. Estimated square roots (-mrecip) fail on some of
// them.
TEST(Adamw, EveryMagnitudeOfGradientStaysFinite) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    std::vector<double> gradients = {0};
    for (int exponent = -44; exponent <= 18; ++exponent)
      for (const double sign : {-1.0, 1.0}) gradients.push_back(sign * std::pow(10.0, exponent));
    const int64_t size = static_cast<int64_t>(gradients.size());
    AdamwState state;
    state.value = at::ones({size}, type);
    if (type == at::kBFloat16) state.master = at::ones({size}, at::kFloat);
    state.exp_avg = at::zeros({size}, at::kFloat);
    state.exp_avg_sq = at::zeros({size}, at::kFloat);
    state.gradient = at::tensor(gradients, at::kDouble).to(at::kFloat);
    auto expected = copy(state);
    const AdamwStep step{.lr = 0.01,
                         .beta1 = 0.9,
                         .beta2 = 0.999,
                         .eps = 1e-8,
                         .weight_decay = 0,
                         .gradient_scale = 1,
                         .step = 1};
    adamw(state, step);
    adamw_reference(expected, step);
    EXPECT_CLOSE(state.value, expected.value, type);
    EXPECT_TRUE(state.value.isfinite().all().item<bool>());
  }
}

TEST(Adamw, DoesNotDependOnThreads) {
  const auto start = random_state({100'003}, at::kBFloat16, 9);
  const int before = at::get_num_threads();
  std::vector<at::Tensor> masters;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    auto state = copy(start);
    adamw(state, kStep);
    masters.push_back(state.master);
  }
  at::set_num_threads(before);
  EXPECT_TRUE(masters[0].equal(masters[1]));
  EXPECT_TRUE(masters[0].equal(masters[2]));
}

class SumOfSquaresOn : public OnDevice {};
BOUGH_ON_DEVICES(SumOfSquaresOn);

TEST_P(SumOfSquaresOn, MatchesReferenceInEveryDtype) {
  for (const auto type : kFloatTypes)
    for (const int64_t size :
         {int64_t{0}, int64_t{1}, int64_t{37}, kSumOfSquaresBlock, 3 * kSumOfSquaresBlock + 5,
          1100 * kSumOfSquaresBlock}) {  // more parts than the last block of the CUDA kernel has threads
      const auto x = random_tensor({size}, type, 7), input = copy_to(device(), x);
      const auto sum = sum_of_squares(input);
      EXPECT_NEAR(sum.item<double>(), sum_of_squares_reference(x).item<double>(),
                  1e-13 * static_cast<double>(size));
      EXPECT_SAME_BITS(sum_of_squares(input), sum);
    }
}

TEST(SumOfSquares, NoOverflowAndNoLossInFp32) {
  EXPECT_NEAR(sum_of_squares(at::full({100}, 1e30f)).item<double>() / 1e62, 1.0, 1e-6);
  EXPECT_NEAR(sum_of_squares(at::full({100}, 1e-30f)).item<double>() * 1e58, 1.0, 1e-6);
}

TEST(SumOfSquares, DoesNotDependOnThreads) {
  const auto x = random_tensor({10 * kSumOfSquaresBlock + 11}, at::kFloat, 3);
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const double one = sum_of_squares(x).item<double>();
  at::set_num_threads(3);
  const double three = sum_of_squares(x).item<double>();
  at::set_num_threads(before);
  EXPECT_EQ(one, three);
}

TEST(SumOfSquares, IsNotFiniteIfAnElementIsNot) {
  for (const auto type : kFloatTypes)
    for (const double bad :
         {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
          std::numeric_limits<double>::quiet_NaN()}) {
      auto x = random_tensor({2 * kSumOfSquaresBlock}, type, 3);
      x[kSumOfSquaresBlock + 123] = bad;
      EXPECT_FALSE(std::isfinite(sum_of_squares(x).item<double>()));
    }
}

BOUGH_HAS_CUDA_KERNELS(Adamw, "adamw_", "sum_of_squares")

}  // namespace
}  // namespace bough

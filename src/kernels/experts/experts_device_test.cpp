#include "kernels/common/cuda_library.h"
#include "kernels/common/device.h"
#include "kernels/experts/expert_pairs.h"
#include "kernels/experts/experts_test_util.h"

namespace bough {
namespace {

BOUGH_HAS_CUDA_KERNELS(Experts, "sort_pairs", "grouped_product", "add_weighted_rows", "weigh_rows_");

class ExpertsOn : public OnDevice {};
BOUGH_ON_DEVICES(ExpertsOn);

constexpr int64_t kExperts = 8;

// Experts of each token, [T, 2]. Uneven: expert 3 has all tokens, expert 5 one token, experts 0, 1, 2, 4 and
// 7 have none. Even: each expert has as many tokens as the next.
at::Tensor uneven_choice(int64_t tokens) {
  const auto choice_TK = at::empty({tokens, 2}, at::kLong);
  choice_TK.select(1, 0).fill_(3);
  choice_TK.select(1, 1).fill_(6);
  choice_TK[tokens / 2][1] = 5;
  return choice_TK;
}
at::Tensor even_choice(int64_t tokens) {
  const auto first_T = at::arange(tokens, at::kLong).mul(3).remainder(kExperts);
  return at::stack({first_T, first_T.add(1).remainder(kExperts)}, 1);
}

// bf16 with 20 columns is not for at::_grouped_mm.
TEST_P(ExpertsOn, EqualTheSublayerInFp64WithUnevenLoads) {
  for (const auto type : kFloatTypes)
    for (const auto& [tokens, width, inner] :
         {std::tuple{1, 64, 32}, {2, 40, 24}, {70, 64, 96}, {70, 20, 24}, {150, 96, 40}})
      for (const bool uneven : {true, false})
        for (const bool with_norm : {true, false}) {
          SCOPED_TRACE(testing::Message()
                       << c10::toString(type) << " " << tokens << " tokens, " << width << " x " << inner
                       << (uneven ? ", uneven" : ", even") << (with_norm ? ", norm" : ""));
          Mixture on_cpu(kExperts, 2, width, inner, type);
          on_cpu.has_norm = on_cpu.residual = on_cpu.renormalise = with_norm;
          for (Parameter* parameter : on_cpu.parameters()) parameter->main_grad.fill_(0.5);
          Mixture f = on_cpu.on(device());
          const auto x = random_tensor({tokens, width}, type, 5),
                     d_y = random_tensor({tokens, width}, type, 6);
          const auto choice_TK = uneven ? uneven_choice(tokens) : even_choice(tokens);
          const ExpectedMixture expected(on_cpu, x, choice_TK, d_y);
          const auto run = [&] {
            auto x_there = copy_to(device(), x).requires_grad_(true);
            const auto y = f.run(x_there, choice_TK.to(device()));
            y.backward(d_y.to(device()));
            return std::pair(y.detach().cpu(), x_there.grad().cpu());
          };
          const auto [y, d_x] = run();
          EXPECT_LE(relative_error(y, expected.y), mixture_bound(type));
          EXPECT_LE(relative_error(d_x, expected.d_x), mixture_bound(type));
          const auto parameters = f.parameters();
          for (size_t i = with_norm ? 0 : 1; i < parameters.size(); ++i)
            EXPECT_LE(relative_error(parameters[i]->main_grad.cpu() - 0.5, expected.gradients[i]),
                      mixture_bound(type))
                << i;
          if (uneven)
            for (const int64_t unused : {0, 1, 2, 4, 7}) {
              EXPECT_TRUE(f.down.main_grad.narrow(0, unused * width, width).eq(0.5).all().item<bool>())
                  << unused;
              EXPECT_TRUE(
                  f.gate_up.main_grad.narrow(0, unused * 2 * inner, 2 * inner).eq(0.5).all().item<bool>())
                  << unused;
            }
          const auto [y_again, d_x_again] = run();
          EXPECT_SAME_BITS(y, y_again);
          EXPECT_SAME_BITS(d_x, d_x_again);
        }
}

TEST_P(ExpertsOn, PairsAreSortedInTheirOrder) {
  for (const int64_t experts : {1, 5, 128})
    for (const auto& [tokens, chosen] : {std::pair{0, 2}, {1, 1}, {3, 1}, {33, 1}, {700, 1}, {90, 5}}) {
      if (chosen > experts) continue;
      const auto choice_TK =
          random_tensor({tokens, experts}, at::kFloat, 3).argsort(int64_t{1}).narrow(1, 0, chosen);
      const auto [pairs_P, places_TK, ends_E] = sort_pairs(choice_TK.to(device()), experts);
      const auto order_P = at::argsort(choice_TK.flatten(), /*stable=*/true, 0, false);
      EXPECT_TRUE(at::equal(pairs_P.cpu(), order_P)) << tokens << " of " << experts;
      EXPECT_TRUE(at::equal(places_TK.cpu().flatten().index_select(0, order_P), at::arange(tokens * chosen)))
          << tokens << " of " << experts;
      EXPECT_TRUE(
          at::equal(ends_E.cpu().to(at::kLong), at::bincount(choice_TK.flatten(), {}, experts).cumsum(0)))
          << tokens << " of " << experts;
    }
}

TEST_P(ExpertsOn, ExpertsWithoutTokensAreNotRead) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const Mixture f = Mixture(kExperts, 2, 64, 32, type).on(device());
    const auto x = random_tensor({5, 64}, type, 5).to(device());
    const auto choice_TK = uneven_choice(5).to(device());
    const auto y = f.run(x, choice_TK);
    for (const int64_t unused : {0, 1, 2, 4, 7}) {
      f.gate_up.value.narrow(0, unused * 64, 64).fill_(NAN);
      f.down.value.narrow(0, unused * 64, 64).fill_(NAN);
    }
    EXPECT_TRUE(at::equal(f.run(x, choice_TK), y)) << c10::toString(type);
  }
}

using CudaExperts = OnCuda;

TEST_F(CudaExperts, AreGroupedInBf16OnHopperAndBlackwell) {
  const int capability = compute_capability(at::kCUDA);
  const bool has_kernels = capability / 10 == 9 || capability / 10 == 10;
  EXPECT_EQ(groups_on_device(at::kCUDA, at::kBFloat16, 128, 2048, 768), has_kernels) << capability;
  EXPECT_FALSE(groups_on_device(at::kCUDA, at::kBFloat16, 128, 2050, 768));
  EXPECT_FALSE(groups_on_device(at::kCUDA, at::kBFloat16, 128, 2048, 770));
  EXPECT_FALSE(groups_on_device(at::kCUDA, at::kBFloat16, 1024, 2048, 768));
  EXPECT_FALSE(groups_on_device(at::kCUDA, at::kFloat, 128, 2048, 768));
  EXPECT_FALSE(groups_on_device(at::kCUDA, at::kChar, 128, 2048, 768));
  EXPECT_FALSE(groups_on_device(at::kCPU, at::kBFloat16, 128, 2048, 768));
}

// A wait for the device while a graph is recorded throws. A replay reads new tokens, whose experts differ.
TEST_F(CudaExperts, ForwardDoesNotWaitForTheDevice) {
  if (!groups_on_device(at::kCUDA, at::kBFloat16, kExperts, 64, 32)) return;
  const c10::AutoGradMode no_grad(false);
  const Mixture f = Mixture(kExperts, 2, 64, 32, at::kBFloat16).on(at::kCUDA);
  const auto x = on_gpu(random_tensor({12, 64}, at::kBFloat16, 5)), y = at::empty_like(x);
  const auto graphs = make_device_graphs();
  ASSERT_TRUE(graphs);
  const auto graph = graphs->capture([&] { y.copy_(f(x)); });
  const auto choice_TK = choose_experts(f.logits(x), 2);
  for (const uint64_t seed : {7, 8}) {
    x.copy_(random_tensor({12, 64}, at::kBFloat16, seed));
    EXPECT_FALSE(at::equal(choose_experts(f.logits(x), 2), choice_TK));
    graph->replay();
    EXPECT_TRUE(at::equal(y, f(x))) << seed;
  }
}

TEST_F(CudaExperts, WrongIndicesAreFound) {
  const auto choice_TK = on_gpu(even_choice(6));
  choice_TK[4][1] = kExperts;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const Mixture f = Mixture(kExperts, 2, 64, 32, type).on(at::kCUDA);
    const auto x = on_gpu(random_tensor({6, 64}, type, 5)).requires_grad_(true);
    const auto weights_TK = on_gpu(at::full({6, 2}, 0.5));
    const auto run = [&] {
      return experts_mlp(x, choice_TK, weights_TK,
                         {.norm = &f.norm, .gate_up = f.gate_up, .down = f.down, .norm_settings = kNormEps});
    };
    if (!groups_on_device(at::kCUDA, type, kExperts, 64, 32)) {
      EXPECT_THROW(run(), std::exception);
      continue;
    }
    const auto y = run();
    const auto is_nan_T = y.isnan().all(1).cpu();
    EXPECT_TRUE(at::equal(is_nan_T, at::arange(6).eq(4)));
    EXPECT_THROW(y.sum().backward(), std::exception);
  }
}

}  // namespace
}  // namespace bough

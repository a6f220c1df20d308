#include "kernels/log_prob/log_prob.h"

#include "kernels/common/device_test.h"
#include "kernels/common/kernel_test.h"

namespace bough {
namespace {

at::Tensor labels_for(int64_t rows, int64_t width) {
  return (at::arange(rows, at::kLong) * 7 + 3).remainder(width);
}

class LogProbOn : public OnDevice {};
BOUGH_ON_DEVICES(LogProbOn);

TEST_P(LogProbOn, MatchesReferenceInEveryDtype) {
  for (const auto type : kFloatTypes)
    for (const double temperature : {0.7, 1.0, 1.3})
      for (const auto& [rows, width] :
           std::vector<std::pair<int64_t, int64_t>>{{1, 2}, {5, 33}, {40, 4096}, {3, 50001}}) {
        const auto acc = accumulator_type(type);
        const auto logits = random_tensor({rows, width}, type, 5), labels = labels_for(rows, width);
        const auto d_log_probs = random_tensor({rows}, acc, 6), d_entropies = random_tensor({rows}, acc, 7);
        const auto expected = log_prob_forward_reference(logits, labels, temperature);
        const auto d_expected = logits.clone();
        log_prob_backward_reference_(d_expected, labels, expected, d_log_probs, d_entropies, temperature);
        const auto got = copy_to(device(), logits), own_labels = copy_to(device(), labels);
        const auto out = log_prob_forward(got, own_labels, temperature);
        EXPECT_CLOSE(out.log_probs_R.cpu(), expected.log_probs_R, acc);
        EXPECT_CLOSE(out.lse_R.cpu(), expected.lse_R, acc);
        EXPECT_CLOSE(out.entropies_R.cpu(), expected.entropies_R, acc);
        EXPECT_SAME_BITS(log_prob_forward(got, own_labels, temperature).lse_R, out.lse_R);
        log_prob_backward_(got, own_labels, out, copy_to(device(), d_log_probs),
                           copy_to(device(), d_entropies), temperature);
        EXPECT_CLOSE(got.cpu(), d_expected, type);
      }
}

TEST(LogProb, BackwardIsTheDerivative) {
  const auto logits = random_tensor({3, 7}, at::kDouble, 5);
  const auto labels = labels_for(3, 7);
  const auto d_log_probs = random_tensor({3}, at::kDouble, 6);
  const auto d_entropies = random_tensor({3}, at::kDouble, 7);
  const auto objective = [&](const at::Tensor& x) {
    const auto out = log_prob_forward(x, labels, 1.3);
    return ((out.log_probs_R * d_log_probs).sum() + (out.entropies_R * d_entropies).sum()).item<double>();
  };
  const auto d = logits.clone();
  log_prob_backward_(d, labels, log_prob_forward(logits, labels, 1.3), d_log_probs, d_entropies, 1.3);
  for (int64_t i = 0; i < logits.numel(); ++i) {
    auto above = logits.clone(), below = logits.clone();
    above.view({-1})[i] += 1e-5;
    below.view({-1})[i] -= 1e-5;
    EXPECT_NEAR(d.view({-1})[i].item<double>(), (objective(above) - objective(below)) / 2e-5, 1e-8);
  }
}

TEST_P(LogProbOn, ConfidentAndHopelessRowsStayFinite) {
  const auto logits =
      copy_to(device(), at::tensor({100.0f, -100.0f, 0.0f, -100.0f, 100.0f, 0.0f}).view({2, 3}));
  const auto labels = copy_to(device(), at::zeros({2}, at::kLong)), ones = copy_to(device(), at::ones({2}));
  const auto out = log_prob_forward(logits, labels, 1.0);
  EXPECT_FLOAT_EQ(out.log_probs_R[0].item<float>(), 0.0f);
  EXPECT_FLOAT_EQ(out.log_probs_R[1].item<float>(), -200.0f);
  log_prob_backward_(logits, labels, out, ones, ones, 1.0);
  EXPECT_TRUE(logits.isfinite().all().item<bool>());
  EXPECT_FLOAT_EQ(logits[1][0].item<float>(), 1.0f);
}

// The columns are cut into three parts, as among tensor-parallel ranks. The gradient of each part equals the
// same columns of the gradient that is computed from all columns.
TEST(LogProb, PartsOfTheColumnsGiveTheResultOfAllColumns) {
  for (const auto type : kFloatTypes) {
    const auto logits = random_tensor({9, 50}, type, 5);
    const auto labels = labels_for(9, 50);
    const auto acc = accumulator_type(type);
    const auto whole = log_prob_forward(logits, labels, 0.7);
    const std::vector<int64_t> cuts = {0, 17, 34, 50};
    std::vector<at::Tensor> parts, own_labels, log_probs, lses, entropies;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      parts.push_back(logits.narrow(1, cuts[i], cuts[i + 1] - cuts[i]).contiguous());
      own_labels.push_back((labels - cuts[i]).masked_fill((labels < cuts[i]) | (labels >= cuts[i + 1]), -1));
      const auto out = log_prob_forward(parts[i], own_labels[i], 0.7);
      log_probs.push_back(out.log_probs_R);
      lses.push_back(out.lse_R);
      entropies.push_back(out.entropies_R);
    }
    const auto merged = merge_columns({at::stack(log_probs), at::stack(lses), at::stack(entropies)});
    EXPECT_CLOSE(merged.log_probs_R, whole.log_probs_R, acc);
    EXPECT_CLOSE(merged.lse_R, whole.lse_R, acc);
    EXPECT_CLOSE(merged.entropies_R, whole.entropies_R, acc);
    const auto d_log_probs = random_tensor({9}, acc, 6), d_entropies = random_tensor({9}, acc, 7);
    const auto d_whole = logits.clone();
    log_prob_backward_(d_whole, labels, whole, d_log_probs, d_entropies, 0.7);
    for (size_t i = 0; i < parts.size(); ++i) {
      log_prob_backward_(parts[i], own_labels[i], merged, d_log_probs, d_entropies, 0.7);
      EXPECT_CLOSE(parts[i], d_whole.narrow(1, cuts[i], cuts[i + 1] - cuts[i]), type);
    }
  }
}

BOUGH_HAS_CUDA_KERNELS(LogProb, "log_prob_forward", "log_prob_backward_", "draw_token")

}  // namespace
}  // namespace bough

// Generation with 8-bit weights samples from slightly other probabilities than training computes. Training's
// mismatch metrics report the difference.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "base/clock.h"
#include "engine/rollouts.h"
#include "rollout/rollout_test_util.h"
#include "train/trainer.h"

namespace bough {
namespace {

// The metrics of one training step on samples of an engine with this quantization. Each call begins with the
// same weights.
MetricValues step_on_samples(at::ScalarType dtype, const std::string& quantization) {
  const auto model = small_rollout_model(dtype, 6);
  auto options = engine_options(16, 64);
  options.settings.quantization = quantization;
  EmbeddedEngine engine(*model, options);
  std::vector<Trajectory> batch;
  for (const GenerationResult& result : engine.generate(mixed_requests()))
    for (size_t i = 0; i < result.samples.size(); ++i) {
      batch.push_back(to_rollout(result, i, str("g", result.id)));
      batch.back().advantage = {i % 2 ? 1.0f : -1.0f};
    }
  ActorSettings settings;
  settings.tree.tree_training_mode = "path";
  const SteadyClock clock;
  Trainer trainer(*model, nullptr, settings, 10, clock);
  return trainer.train_step(batch);
}

TEST(Quantization, MismatchMetricsShowItsCost) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto exact = step_on_samples(dtype, "none"), quantized = step_on_samples(dtype, "int8");
    EXPECT_LT(exact.at("mismatch/logprob_abs_diff"), 1e-5) << dtype;
    EXPECT_GT(quantized.at("mismatch/logprob_abs_diff"), 1e-3) << dtype;
    EXPECT_LT(quantized.at("mismatch/logprob_abs_diff"), 0.05) << dtype;
    EXPECT_GT(quantized.at("mismatch/importance_weight_max"), 1.001) << dtype;
    EXPECT_LT(quantized.at("mismatch/importance_weight_max"), 1.5) << dtype;
    EXPECT_NEAR(quantized.at("mismatch/importance_weight_mean"), 1, 0.02) << dtype;
  }
}

}  // namespace
}  // namespace bough

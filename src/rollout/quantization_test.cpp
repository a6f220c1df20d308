// Generation with 8-bit weights: the results are those of the quantized model, are close to the source
// model's, and follow its weight updates.
#include <thread>

#include "kernels/common/priority_stream.h"
#include "models/quantized_model.h"
#include "rollout/rollout_test_util.h"

namespace bough {
namespace {

class Quantization : public OnDevice {};
BOUGH_ON_DEVICES(Quantization);

EmbeddedEngineOptions int8_options(int64_t max_running = 64, int64_t chunk = 512) {
  auto options = engine_options(max_running, chunk);
  options.settings.quantization = "int8";
  return options;
}

std::vector<std::vector<int32_t>> tokens_of(const std::vector<GenerationResult>& results) {
  std::vector<std::vector<int32_t>> tokens;
  for (const GenerationResult& result : results)
    for (const GeneratedSample& sample : result.samples) tokens.push_back(sample.token_ids);
  return tokens;
}

// Log-probabilities are those of the behavior policy, which is quantized. The training policy's differ
// slightly.
TEST_P(Quantization, LogProbabilitiesEqualTheQuantizedModels) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const auto model = small_rollout_model(dtype, 3, small_config(), device());
    EmbeddedEngine engine(*model, int8_options(7, 24));
    double worst = 0, from_model = 0;
    for (const GenerationResult& result : engine.generate(mixed_requests())) {
      worst = std::max(worst, largest_log_prob_error(engine.generating_model(), result, 1.0));
      from_model = std::max(from_model, largest_log_prob_error(*model, result, 1.0));
    }
    EXPECT_LT(worst, dtype == at::kDouble ? 1e-9 : dtype == at::kFloat ? 1e-4 : 0.3) << dtype;
    EXPECT_LT(from_model, 0.5) << dtype;
    if (dtype != at::kBFloat16) {
      EXPECT_GT(from_model, 1e-3) << dtype;
    }
  }
}

// Greedy tokens are the source model's own, except if two logits are closer than the rounding of weights
// moves them.
TEST_P(Quantization, GreedyIsTheArgmaxUnlessTwoLogitsAreClose) {
  const auto model = small_rollout_model(at::kFloat, 4, small_config(), device());
  EmbeddedEngine engine(*model, int8_options());
  int64_t tokens_seen = 0, same = 0;
  for (const GenerationResult& result : engine.generate(mixed_requests(0.0)))
    for (const GeneratedSample& sample : result.samples) {
      std::vector<int32_t> tokens = result.prompt_ids;
      tokens.insert(tokens.end(), sample.token_ids.begin(), sample.token_ids.end());
      const auto logits = full_logits(*model, tokens);
      for (size_t i = 0; i < sample.token_ids.size(); ++i) {
        const auto row = logits[static_cast<int64_t>(result.prompt_ids.size() + i) - 1];
        const double gap = (row.max() - row[sample.token_ids[i]]).item<double>();
        EXPECT_LT(gap, 0.3);
        same += gap == 0;
        ++tokens_seen;
      }
    }
  EXPECT_GT(same, tokens_seen * 9 / 10) << "of " << tokens_seen;
}

using CudaQuantization = OnCuda;

TEST_F(CudaQuantization, AnEngineKeepsItsMemoryUntilItsThreadsWorkIsDone) {
  const auto model = small_rollout_model(at::kFloat, 5, small_config(), at::kCUDA);
  EmbeddedEngine engine(*model, int8_options());
  std::thread([&] {
    use_priority_stream(at::kCUDA);
    engine.update_weights({1, model.get()});  // quantizes them on the thread's stream
  }).join();
}

TEST_P(Quantization, NewWeightsAreQuantizedAgain) {
  const auto model = small_rollout_model(at::kFloat, 5, small_config(), device());
  EmbeddedEngine engine(*model, int8_options());
  auto requests = mixed_requests();
  for (GenerationRequest& request : requests) engine.submit(request);
  for (int i = 0; i < 8; ++i) engine.step();
  {
    const at::NoGradGuard no_grad;
    for (Parameter* parameter : model->parameters())
      parameter->value.mul_(parameter->value.dim() == 2 ? 1.3 : 1.0);
  }
  engine.update_weights({4, model.get()});
  const QuantizedModel now(*model);
  double before = 0, after = 0;
  int64_t sampled_after = 0;
  for (const GenerationResult& result : engine.drain()) {
    // Tokens of the new version have the new weights' log-probabilities. Earlier tokens have the old
    // weights'.
    for (const GeneratedSample& sample : result.samples) {
      std::vector<int32_t> tokens = result.prompt_ids;
      tokens.insert(tokens.end(), sample.token_ids.begin(), sample.token_ids.end());
      const auto log_probs = at::log_softmax(full_logits(now.model(), tokens), -1);
      for (size_t i = 0; i < sample.token_ids.size(); ++i) {
        const auto row = static_cast<int64_t>(result.prompt_ids.size() + i) - 1;
        const double error =
            std::abs(log_probs[row][sample.token_ids[i]].item<double>() - sample.logprobs[i]);
        (sample.versions[i] == 4 ? after : before) =
            std::max(sample.versions[i] == 4 ? after : before, error);
        sampled_after += sample.versions[i] == 4;
      }
    }
  }
  EXPECT_GT(sampled_after, 100);
  EXPECT_LT(after, 1e-4);
  EXPECT_GT(before, 1e-2);
}

TEST_P(Quantization, AModelQuantizedInPlaceGeneratesTheSame) {
  const auto model = small_rollout_model(at::kFloat, 6, small_config(), device()),
             in_place = small_rollout_model(at::kFloat, 6, small_config(), device());
  EmbeddedEngine copying(*model, int8_options());
  const auto expected = tokens_of(copying.generate(mixed_requests()));
  const MatrixBytes bytes = apply_quantization(int8_options().settings, *in_place);
  EXPECT_LT(bytes.held, bytes.unquantized / 3);
  EmbeddedEngine engine(*in_place, int8_options());
  EXPECT_EQ(&engine.generating_model(), in_place.get());
  EXPECT_EQ(tokens_of(engine.generate(mixed_requests())), expected);
}

// A quantized model is batch-invariant too: each token's sums have an order that no other token changes.
TEST(QuantizationBatchInvariant, TokensDoNotDependOnTheirNeighbours) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto model = small_rollout_model(dtype, 7);
    if (model->why_not_batch_invariant()) continue;
    model->set_batch_invariant(true);
    const auto log_probs = [&](int64_t max_running, int64_t chunk) {
      auto options = int8_options(max_running, chunk);
      options.settings.batch_invariant = true;
      EmbeddedEngine engine(*model, options);
      std::vector<double> all;
      for (const GenerationResult& result : engine.generate(mixed_requests()))
        for (const GeneratedSample& sample : result.samples)
          all.insert(all.end(), sample.logprobs.begin(), sample.logprobs.end());
      return all;
    };
    const auto expected = log_probs(64, 512);
    EXPECT_EQ(log_probs(1, 7), expected) << dtype;
    EXPECT_EQ(log_probs(5, 33), expected) << dtype;
  }
}

}  // namespace
}  // namespace bough

// With a batch-invariant model the log-probabilities that generation returns equal those of training, bit for
// bit: with the dense trainer and with every other plan.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "engine/rollouts.h"
#include "kernels/matrix_product/matrix_product.h"
#include "plan/plan.h"
#include "rollout/rollout_test_util.h"
#include "train/executor.h"

namespace bough {
namespace {

// Groups whose prompts begin with the same tokens. KV memory has few pages, so that samples are preempted
// too.
std::vector<Trajectory> sample(const Model& model, double temperature) {
  auto options = engine_options(7, 24);
  options.settings.batch_invariant = true;
  options.settings.kv_memory.count = 30 * KvStorage::bytes_per_page(model.config(), model.dtype());
  EmbeddedEngine engine(model, options);
  std::vector<GenerationRequest> requests;
  for (uint64_t i = 0; i < 5; ++i) {
    auto prompt = random_tokens(1, 21, 97);
    const auto own = random_tokens(10 + i, 5 + 9 * static_cast<int64_t>(i), 97);
    prompt.insert(prompt.end(), own.begin(), own.end());
    auto request = request_of(i, prompt, 4, 30 + static_cast<int64_t>(i));
    request.sampling.temperature = temperature;
    requests.push_back(std::move(request));
  }
  std::vector<Trajectory> sampled;
  for (const GenerationResult& result : engine.generate(std::move(requests)))
    for (size_t i = 0; i < result.samples.size(); ++i) sampled.push_back(to_rollout(result, i, "g"));
  return sampled;
}

void expect_equal_bits(const ModelConfig& config, HeadType head = HeadType::kModel) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto model = small_rollout_model(dtype, 6, config);
    if (model->why_not_batch_invariant()) continue;
    if (dtype == at::kBFloat16) model->set_head_type(head);
    model->set_batch_invariant(true);
    for (const double temperature : {1.0, 0.7}) {
      const std::vector<Trajectory> sampled = sample(*model, temperature);
      const TrainBatch batch = make_batch(sampled, {}, at::kFloat);
      ASSERT_GT(batch.num_rows(), 500);
      const auto expected = batch.fields.behaviour_log_probs_R;
      for (const char* strategy : {"dense", "packed", "path", "blocks"})
        for (const int64_t pass_tokens : {100, 700})
          for (const int threads : {1, 2}) {
            at::set_num_threads(threads);
            const Plan plan = make_plan(strategy, plan_request(batch, pass_tokens));
            Executor executor(*model, {.head_chunk_rows = pass_tokens == 100 ? 13 : 0});
            const auto got = executor.execute_forward(plan, batch).log_probs_R;
            EXPECT_TRUE(at::equal(got, expected))
                << strategy << ", passes of " << pass_tokens << ", " << threads << " threads, " << dtype
                << ": " << (got - expected).abs().max().item<double>();
          }
      at::set_num_threads(1);
    }
  }
}

TEST(BatchInvariant, GenerationAgreesWithTrainingBitForBitInEveryPlan) {
  expect_equal_bits(small_config());
}

TEST(BatchInvariant, SoDoesAMixtureOfExperts) {
  expect_equal_bits(small_mixture_config());
}

TEST(BatchInvariant, SoDoesAHeadInFp32) {
  expect_equal_bits(small_config(), HeadType::kAccumulator);
}

// Without batch invariance. The bits of hidden states differ, and logits in bf16 enlarge the difference. If
// bf16 is multiplied as fp32, both sides differ by rounding only.
TEST(HeadType, LogitsInFp32BringGenerationAndTrainingCloser) {
  const auto model = small_rollout_model(at::kBFloat16, 6);
  double differences[2] = {};
  for (const HeadType head : {HeadType::kModel, HeadType::kAccumulator}) {
    model->set_head_type(head);
    EmbeddedEngine engine(*model, engine_options(7, 24));
    std::vector<Trajectory> sampled;
    for (const GenerationResult& result : engine.generate(mixed_requests()))
      for (size_t i = 0; i < result.samples.size(); ++i) sampled.push_back(to_rollout(result, i, "g"));
    const TrainBatch batch = make_batch(sampled, {}, at::kFloat);
    const Plan plan = make_plan("blocks", plan_request(batch, 100));
    const auto got = Executor(*model).execute_forward(plan, batch).log_probs_R;
    differences[head == HeadType::kAccumulator] =
        (got - batch.fields.behaviour_log_probs_R).abs().mean().item<double>();
  }
  const bool copies = copies_to_fp32(at::kBFloat16);
  EXPECT_TRUE(copies || differences[0] > 0);
  EXPECT_LT(differences[1], copies ? 1e-5 : differences[0]);
  std::cerr << "mean |difference|: " << differences[0] << " with bf16 logits, " << differences[1] << "\n";
}

}  // namespace
}  // namespace bough

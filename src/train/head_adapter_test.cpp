// Adapters of the lm_head, tied or not: gradients against the flat batch, and the merged model.
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "base/error.h"
#include "models/lora.h"
#include "train/reference_comparison.h"

namespace bough {
namespace {

// With B = 0, A would have no gradient.
void fill_adapters(Model& model, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  for (Parameter* parameter : model.trained_parameters()) parameter->value.normal_(0, 0.3, generator);
}

std::unique_ptr<Model> model_with_head_adapter(uint64_t seed, at::ScalarType type, bool only_head) {
  auto model = random_model(seed, type);
  // A larger alpha would saturate the softmax: gradients would be rounding errors.
  LoraSettings lora{.rank = 3, .alpha = 2, .targets = {{"lm_head"}}};
  if (!only_head) lora.targets.push_back({"all-linear"});
  add_adapter(*model, lora, seed);
  fill_adapters(*model, seed);
  return model;
}

LossSettings settings_of(const char* loss, const char* teacher_mode = "") {
  LossSettings settings;
  settings.loss = loss;
  settings.entropy_coef = 0.1;
  settings.teacher.loss_mode = teacher_mode;
  if (*teacher_mode) settings.teacher.path = "t";
  return settings;
}

// gspo couples the tokens of a sequence, so a block's logits may be computed twice. The teacher's top-k
// tokens have gradients of their own.
TEST(HeadAdapter, EveryPlanHasTheFlatBatchsGradients) {
  for (const LossSettings& settings :
       {settings_of("ppo"), settings_of("gspo"), settings_of("ppo", "topk"), settings_of("gspo", "topk")}) {
    const auto loss = make_loss(settings);
    for (uint64_t seed = 0; seed < 36; ++seed) {
      const auto r = random_batch(seed, 100);
      add_top_k_tokens(*r, seed);
      const auto model = model_with_head_adapter(seed, at::kDouble, seed % 4 == 0);
      auto flat = FlatReference(*model).run(r->batch, *loss);
      for (const char* strategy : kStrategies) {
        const Plan plan = with_random_keeps(make_plan(strategy, plan_request(r->batch, 24)), seed);
        expect_exact(*model, flat, *r, plan, *loss, str(settings.loss, " ", strategy, " seed ", seed));
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// The model that merge_adapter() leaves has the log-probabilities of the model with the adapter. A tied
// lm_head then has values of its own, and the embedding is unchanged.
TEST(HeadAdapter, AMergedModelIsUntiedAndHasTheSameLogProbabilities) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    const auto r = random_batch(seed, 100);
    if (r->batch.num_rows() == 0) continue;
    const auto model = model_with_head_adapter(seed, at::kDouble, seed % 4 == 0);
    const at::Tensor embedding = model->embedding().value.clone();
    const Plan plan = make_plan("blocks", plan_request(r->batch, 24));
    const at::Tensor expected = Executor(*model).execute_forward(plan, r->batch).log_probs_R;
    const size_t num_parameters = model->parameters().size();
    const bool was_tied = model->config().tie_word_embeddings;
    merge_adapter(*model);
    EXPECT_FALSE(has_adapter(*model));
    EXPECT_FALSE(model->config().tie_word_embeddings);
    EXPECT_EQ(model->parameters().size(), num_parameters + (was_tied ? 1 : 0));
    EXPECT_EQ(model->head().parts[0].name, "lm_head.weight");
    EXPECT_TRUE(model->embedding().value.equal(embedding));
    const at::Tensor merged = Executor(*model).execute_forward(plan, r->batch).log_probs_R;
    EXPECT_LE((merged - expected).abs().max().item<double>(), 1e-10) << seed;
  }
}

// all-linear leaves the lm_head out, as in PEFT. Another model over the same weights keeps its own adapter.
TEST(HeadAdapter, OnlyANamedHeadHasAnAdapter) {
  const auto model = random_model(1, at::kFloat);
  add_adapter(*model, {.rank = 3}, 1);
  EXPECT_TRUE(model->head().adapter.empty());
  EXPECT_EQ(model->head_adapter_elements(), 0);
  const auto with_head = without_adapter(*model);
  add_adapter(*with_head, {.rank = 3, .targets = {{"lm_head"}}}, 1);
  EXPECT_EQ(with_head->adapter_elements(), 3 * (kVocab + model->config().hidden_size));
  EXPECT_EQ(with_head->head_adapter_elements(), with_head->adapter_elements());
  EXPECT_EQ(adapter_tensors(*with_head)[1].first, "base_model.model.lm_head.lora_B.weight");
  EXPECT_TRUE(model->head().adapter.empty());
  EXPECT_TRUE(without_adapter(*with_head)->head().adapter.empty());
}

}  // namespace
}  // namespace bough

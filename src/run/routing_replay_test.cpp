// Experts that generation recorded, replayed in training (actor.routing_replay R3).
#include <gtest/gtest.h>

#include "engine/rollouts.h"
#include "plan/plan.h"
#include "rollout/rollout_test_util.h"
#include "train/executor.h"

namespace bough {
namespace {

// Samples with prefix hits, prompts in chunks, preemptions, and an update of the weights (to equal ones) in
// the middle of the samples.
std::vector<Trajectory> recorded_samples(const Model& model) {
  auto options = engine_options(7, 24);
  options.settings.return_routed_experts = true;
  options.settings.kv_memory.count = 16 * KvStorage::bytes_per_page(model.config(), model.dtype());
  EmbeddedEngine engine(model, options);
  for (uint64_t i = 0; i < 5; ++i) {
    auto prompt = random_tokens(1, 21, 97);
    const auto own = random_tokens(10 + i, 5 + 9 * static_cast<int64_t>(i), 97);
    prompt.insert(prompt.end(), own.begin(), own.end());
    engine.submit(request_of(i, prompt, 4, 30 + static_cast<int64_t>(i)));
  }
  std::vector<Trajectory> samples;
  for (int64_t step = 0; !engine.idle(); ++step) {
    if (step == 20) engine.update_weights({.version = 1, .model = &model});
    for (const GenerationResult& result : engine.step())
      for (size_t i = 0; i < result.samples.size(); ++i) samples.push_back(to_rollout(result, i, "g"));
  }
  EXPECT_GT(engine.statistics().preemptions, 0);
  EXPECT_GT(engine.statistics().cached_tokens, 0);
  EXPECT_GT(engine.statistics().replayed_experts, 0);
  EXPECT_GT(engine.statistics().rerouted_experts, 0);
  for (const Trajectory& sample : samples)
    EXPECT_EQ(sample.routed_experts.num_rows(), std::ssize(sample.input_ids) - 1);
  return samples;
}

std::vector<const Trajectory*> pointers(const std::vector<Trajectory>& samples) {
  std::vector<const Trajectory*> rows;
  for (const Trajectory& sample : samples) rows.push_back(&sample);
  return rows;
}

// The largest difference between the engine's log-probabilities and those of training with the records.
double replay_error(Model& model, const std::vector<Trajectory>& samples, const std::string& strategy) {
  TrainBatch batch = make_batch(samples, {}, at::kFloat);
  mark_tokens(batch, pointers(samples), {.experts = true});
  Executor executor(model, {.replays_experts = true});
  const auto got = executor.execute_forward(make_plan(strategy, plan_request(batch, 100)), batch).log_probs_R;
  return (got - batch.fields.behaviour_log_probs_R).abs().max().item<double>();
}

TEST(RoutingReplayOfGeneration, HasTheEnginesLogProbabilitiesAtEveryToken) {
  const auto model = small_rollout_model(at::kFloat, 6, small_mixture_config());
  const std::vector<Trajectory> samples = recorded_samples(*model);
  for (const char* strategy : {"dense", "path", "blocks"}) {
    EXPECT_LE(replay_error(*model, samples, strategy), 1e-4) << strategy;
  }
}

TEST(RoutingReplayOfGeneration, OneFlippedRouteIsFound) {
  const auto model = small_rollout_model(at::kFloat, 6, small_mixture_config());
  std::vector<Trajectory> samples = recorded_samples(*model);
  RoutedExperts& routed = samples[3].routed_experts;
  const auto row = routed.row(routed.num_rows() - 3);
  uint16_t other = 0;
  while (other == row[0] || other == row[1]) ++other;
  routed.experts[static_cast<size_t>((routed.num_rows() - 3) * routed.row_size())] = other;
  EXPECT_GT(replay_error(*model, samples, "blocks"), 1e-4);
}

// The share of (token, layer) whose recorded experts differ from the trainer's own choice.
TEST(RoutingReplayOfGeneration, InFp32TheTrainerWouldChooseTheSameExperts) {
  const auto model = small_rollout_model(at::kFloat, 6, small_mixture_config());
  const std::vector<Trajectory> samples = recorded_samples(*model);
  TrainBatch batch = make_batch(samples, {}, at::kFloat);
  mark_tokens(batch, pointers(samples), {.experts = true});
  batch.fields.proximal_is_current = true;
  batch.fields.advantages_R = at::ones({batch.num_rows()});
  Executor executor(*model, {.replays_experts = true});
  const ExecutionResult result =
      executor.execute(make_plan("blocks", plan_request(batch, 100)), batch, *make_loss({}));
  EXPECT_GT(result.metrics.at("experts/routes_differ").weight, 500);
  EXPECT_LE(result.metrics.at("experts/routes_differ").value(), 1e-5);
  EXPECT_GE(result.metrics.at("experts/load_max").value(), 1);
}

}  // namespace
}  // namespace bough

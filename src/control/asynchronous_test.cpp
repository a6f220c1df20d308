// Runs whose engine generates beside the trainer: every token's log-probability is that of the weights which
// its label names, and the loop goes on from a checkpoint.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "control/control_test_util.h"
#include "control/controller.h"
#include "plan/plan.h"
#include "rollout/copied_weights.h"
#include "rollout/rollout_test_util.h"
#include "train/executor.h"
#include "train/make_batch.h"

namespace bough {
namespace {

// Takes its time and moves the weights at random, far enough that other weights give other
// log-probabilities; keeps each version's.
class WanderingTrainer final : public BatchTrainer {
 public:
  explicit WanderingTrainer(Model& model) : model_(model) { keep(); }

  MetricValues train(const std::vector<Trajectory>& batch) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(15));
    const at::NoGradGuard no_grad;
    for (Parameter* parameter : model_.parameters())
      parameter->value.add_(at::randn_like(parameter->value), 0.02);
    batches.push_back(batch);
    keep();
    return {};
  }

  std::vector<std::vector<Trajectory>> batches;
  std::vector<std::unique_ptr<Model>> versions;

 private:
  void keep() { versions.push_back(copy_of(model_)); }
  Model& model_;
};

struct AsynchronousRun {
  explicit AsynchronousRun(int64_t eta, int64_t batch_groups = 3, int64_t total_steps = 8) {
    at::manual_seed(3);
    settings.train_dataset.batch_size = batch_groups;
    settings.gconfig = {.n_samples = 4, .max_new_tokens = 90};
    settings.rollout.max_head_offpolicyness = eta;
    settings.rollout.max_concurrent_rollouts = 16;
    settings.seed = 5;
    auto options = engine_options(257, 24);
    options.settings = settings.rollout;
    engine = std::make_unique<EmbeddedEngine>(*generating, options);
    ControllerParts parts{settings, problems, encoder, *engine, reward, trainer, weights, clock, total_steps};
    parts.on_engine_thread = [] { at::set_num_threads(1); };
    controller = std::make_unique<Controller>(parts);
  }

  RunSettings settings;
  Dataset problems = testing::numbered_problems(7);
  PromptEncoder encoder = testing::byte_level_encoder();
  testing::FakeReward reward;
  SteadyClock clock;
  std::unique_ptr<Model> model = small_model(at::kFloat, 4, small_config(260));
  std::unique_ptr<Model> generating = copy_of(*model);
  WanderingTrainer trainer{*model};
  CopiedWeights weights{*model, *generating, false};
  std::unique_ptr<EmbeddedEngine> engine;
  std::unique_ptr<Controller> controller;
};

// The largest distance between what the engine said of a token and what the weights of (its label + shift)
// say, over all tokens of the batch.
double largest_error(AsynchronousRun& run, const std::vector<Trajectory>& batch, int32_t shift) {
  const TrainBatch flat = make_batch(batch, {}, at::kFloat);
  std::map<int32_t, at::Tensor> log_probs_R;  // under each version's weights
  double largest = 0;
  std::vector<int32_t> labels;
  for (const Trajectory& sample : batch)
    for (size_t i = 1; i < sample.versions.size(); ++i)
      if (sample.loss_mask[i] != 0) labels.push_back(sample.versions[i]);
  EXPECT_EQ(static_cast<int64_t>(labels.size()), flat.num_rows());
  for (size_t row = 0; row < labels.size(); ++row) {
    const int32_t version = labels[row] + shift;
    if (!log_probs_R.contains(version)) {
      Executor executor(*run.trainer.versions.at(static_cast<size_t>(version)));
      const Plan plan = make_plan("dense", plan_request(flat, 4096));
      log_probs_R[version] = executor.forward(plan, flat).log_probs_R;
    }
    const auto index = static_cast<int64_t>(row);
    const auto said = flat.fields.behaviour_log_probs_R[index].item<double>();
    largest = std::max(largest, std::abs(log_probs_R[version][index].item<double>() - said));
  }
  return largest;
}

TEST(Asynchronous, EveryTokenWasDrawnByTheWeightsThatItsLabelNames) {
  AsynchronousRun run(/*eta=*/2);
  std::set<int32_t> labels;
  int64_t mixed = 0;
  double wrong_label = 0;
  for (int64_t step = 0; step < 8; ++step) {
    const auto record = run.controller->step();
    ASSERT_TRUE(record);
    EXPECT_LE(record->metrics.at("staleness/max"), step);
    for (const Trajectory& sample : record->batch) {
      std::set<int32_t> own;
      for (size_t i = 0; i < sample.versions.size(); ++i)
        if (sample.loss_mask[i] != 0) own.insert(sample.versions[i]);
      mixed += own.size() > 1;
      labels.insert(own.begin(), own.end());
    }
    EXPECT_LT(largest_error(run, run.trainer.batches.back(), 0), 1e-4) << "step " << step;
    wrong_label = std::max(wrong_label, largest_error(run, run.trainer.batches.back(), 1));
  }
  EXPECT_GT(labels.size(), 2u);
  EXPECT_GT(mixed, 0) << "no sample was interrupted";
  EXPECT_GT(wrong_label, 1e-2) << "labels shifted by one are not told from right ones";
}

TEST(Asynchronous, AnEvaluationBetweenStepsHasTheStepsWeightsAndLosesNoSample) {
  AsynchronousRun run(/*eta=*/3);
  std::set<std::string> seen;
  for (int64_t step = 0; step < 8; ++step) {
    ASSERT_TRUE(run.controller->step());
    run.controller->while_suspended([&] {
      EXPECT_EQ(run.engine->version(), step + 1);
      EXPECT_TRUE(run.engine->idle());
      const auto results = run.engine->generate({request_of(0, {81, 49, 32}, 2, 5)});
      EXPECT_EQ(results.at(0).samples.at(0).versions.at(0), step + 1);
    });
  }
  EXPECT_EQ(run.trainer.batches.size(), 8u);
}

TEST(Asynchronous, WhatWasBegunSinceTheCheckpointIsTrainedOnOnce) {
  AsynchronousRun first(/*eta=*/3);
  std::multiset<std::string> trained;
  const auto add = [&](const AsynchronousRun& run) {
    for (const auto& batch : run.trainer.batches)
      for (size_t i = 0; i < batch.size(); i += 4) trained.insert(*batch[i].prompt);
  };
  for (int64_t step = 0; step < 3; ++step) ASSERT_TRUE(first.controller->step());
  const Json saved = Json::parse(first.controller->save().dump());
  add(first);
  EXPECT_GT(saved.at("next_position").get<int64_t>(), 9) << "nothing was begun ahead";

  AsynchronousRun second(/*eta=*/3);
  second.controller->restore(saved);
  for (int64_t step = 3; step < 8; ++step) ASSERT_TRUE(second.controller->step());
  add(second);
  // 24 groups are three epochs of seven problems and three more: each problem three or four times.
  EXPECT_EQ(trained.size(), 24u);
  for (int64_t i = 0; i < 7; ++i) {
    const auto times = trained.count(str("Q", i, " "));
    EXPECT_TRUE(times == 3 || times == 4) << "problem " << i << ": " << times << " times";
  }
}

}  // namespace
}  // namespace bough

// Runs whose engine generates in parallel with the trainer. Every token's log-probability is that of the
// weights of the token's version. A resumed run continues from a checkpoint.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <thread>

#include "control/fakes.h"
#include "control/workers.h"
#include "plan/plan.h"
#include "rollout/copied_weights.h"
#include "rollout/rollout_test_util.h"
#include "train/executor.h"
#include "train/make_batch.h"
#include "train/trainer.h"

namespace bough {
namespace {

// Each step takes some time and moves the weights at random, far enough that other weights give other
// log-probabilities. Keeps each version's weights.
class WanderingTrainer final : public BatchTrainer {
 public:
  explicit WanderingTrainer(Model& model) : model_(model) { keep(); }

  MetricValues train_step(const std::vector<Trajectory>& batch) override {
    std::this_thread::sleep_for(pause);
    const at::NoGradGuard no_grad;
    for (Parameter* parameter : model_.parameters())
      parameter->value.add_(at::randn_like(parameter->value), 0.02);
    batches.push_back(batch);
    keep();
    return {};
  }
  int64_t peak_bytes() const override { return 0; }

  std::chrono::milliseconds pause{5};
  std::vector<std::vector<Trajectory>> batches;
  std::vector<std::unique_ptr<Model>> versions;

 private:
  void keep() { versions.push_back(copy_of(model_)); }
  Model& model_;
};

struct AsynchronousRun final : StepTrainer, Evaluator, ControllerObserver {
  explicit AsynchronousRun(int64_t eta, int64_t batch_groups = 3, int64_t total_steps = 8) {
    at::manual_seed(3);
    sampling = {.n_samples = 4, .max_new_tokens = 90};
    auto options = engine_options(257, 24);
    options.settings.max_head_offpolicyness = eta;
    options.settings.max_concurrent_rollouts = 16;
    // Makes the engine slower than the trainer on any machine, so that new weights arrive while samples run.
    options.on_pass = [](const PassWork&) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); };
    engine = std::make_unique<EmbeddedEngine>(*generating, options);
    workers = std::make_unique<RunWorkers>(
        WorkerParts{.engine = *engine,
                    .weights = weights,
                    .codec = encoder,
                    .reward = reward,
                    .clock = clock,
                    .tasks = tasks,
                    .trainer = *this,
                    .checkpoints = checkpoints,
                    .evaluator = this},
        WorkerOptions{.generation = {.sampling = sampling, .seed = 5, .samples_in_flight = 64},
                      .own_threads = true,
                      .on_engine_thread = [] { at::set_num_threads(1); },
                      .on_trainer_thread = [] { at::set_num_threads(1); }});
    controller = std::make_unique<Controller>(*workers, clock,
                                              ControllerOptions{.batch_groups = batch_groups,
                                                                .max_staleness = eta,
                                                                .total_steps = total_steps,
                                                                .group_size = 4,
                                                                .samples_in_flight = 32},
                                              policy, *this);
    policy.evaluates = [this](int64_t step, bool) { return evaluates && step > 0; };
  }

  void on_batch(const StepRecord& record) override { records.push_back(record); }
  StepRecord train(const TrainOrder& order) override {
    StepRecord record{.step = order.step, .metrics = {}, .batch = {}};
    for (const ScoredGroup& scored : order.groups)
      for (Trajectory& row : scored.rows()) record.batch.push_back(std::move(row));
    record.metrics = trainer.train_step(record.batch);
    return record;
  }
  std::optional<MetricValues> evaluate(const std::function<bool()>&) override {
    EXPECT_TRUE(engine->idle());
    const auto results = engine->generate({request_of(0, {81, 49, 32}, 2, 5)});
    evaluated_versions.push_back(engine->version());
    EXPECT_EQ(results.at(0).samples.at(0).versions.at(0), engine->version());
    return MetricValues{{"eval/avg_at_k", 0}};
  }
  void run(const std::function<bool()>& stop = {}) {
    controller->start();
    drive(*controller, *workers, {.stop = stop, .on_activity = {}});
  }

  SamplingParameters sampling;
  Dataset problems = testing::numbered_problems(7);
  testing::RepeatedProblems tasks{problems};
  testing::FakeCheckpoints checkpoints;
  testing::FakePolicy policy;
  PromptEncoder encoder = testing::byte_level_encoder();
  testing::FakeReward reward;
  SteadyClock clock;
  std::unique_ptr<Model> model = small_rollout_model(at::kFloat, 4, small_config(260));
  std::unique_ptr<Model> generating = copy_of(*model);
  WanderingTrainer trainer{*model};
  CopiedWeights weights{*model, *generating, false};
  std::unique_ptr<EmbeddedEngine> engine;
  bool evaluates = false;
  std::vector<int32_t> evaluated_versions;
  std::vector<StepRecord> records;
  std::unique_ptr<RunWorkers> workers;
  std::unique_ptr<Controller> controller;
};

// The largest difference between the engine's log-probability of a token and that of the weights of version
// (the token's version + shift), over all tokens of the batch.
double largest_error(AsynchronousRun& run, const std::vector<Trajectory>& batch, int32_t shift) {
  const TrainBatch flat = make_batch(batch, {}, at::kFloat);
  std::map<int32_t, at::Tensor> log_probs_R;  // by version of the weights
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
      log_probs_R[version] = executor.execute_forward(plan, flat).log_probs_R;
    }
    const auto index = static_cast<int64_t>(row);
    const auto said = flat.fields.behaviour_log_probs_R[index].item<double>();
    largest = std::max(largest, std::abs(log_probs_R[version][index].item<double>() - said));
  }
  return largest;
}

std::set<int32_t> labels_of(const Trajectory& sample) {
  std::set<int32_t> labels;
  for (size_t i = 0; i < sample.versions.size(); ++i)
    if (sample.loss_mask[i] != 0) labels.insert(sample.versions[i]);
  return labels;
}

TEST(Asynchronous, EveryTokenWasSampledByTheVersionInItsLabel) {
  AsynchronousRun run(/*eta=*/2);
  run.run();
  ASSERT_EQ(run.records.size(), 8u);
  std::set<int32_t> labels;
  int64_t mixed = 0;
  double wrong_label = 0;
  for (const StepRecord& record : run.records) {
    for (const Trajectory& sample : record.batch) {
      const std::set<int32_t> own = labels_of(sample);
      EXPECT_LT(*own.rbegin(), record.step) << "a version that was not trained yet";
      mixed += own.size() > 1;
      labels.insert(own.begin(), own.end());
    }
    EXPECT_LT(largest_error(run, record.batch, 0), 1e-4) << "step " << record.step;
    wrong_label = std::max(wrong_label, largest_error(run, record.batch, 1));
  }
  EXPECT_GT(labels.size(), 2u);
  EXPECT_GT(mixed, 0) << "no sample was interrupted";
  EXPECT_GT(wrong_label, 1e-2) << "labels shifted by one are not told from right ones";
}

TEST(Asynchronous, EvaluationUsesTheWeightsOfItsStepAndLosesNoSample) {
  AsynchronousRun run(/*eta=*/3);
  run.evaluates = true;
  run.run();
  EXPECT_EQ(run.trainer.batches.size(), 8u);
  ASSERT_FALSE(run.evaluated_versions.empty());
  EXPECT_EQ(run.evaluated_versions.back(), 8);
  // The trainer is as fast as an evaluation, so some steps may have none; a log line says why. Evaluations
  // are in the order of steps.
  EXPECT_TRUE(std::is_sorted(run.evaluated_versions.begin(), run.evaluated_versions.end()));
}

// The first run stops in the middle of samples. The resumed run samples the rest under its own weights. The
// tokens of the first run keep their versions, and each token's log-probability is that of its version.
TEST(Asynchronous, PartialRolloutsContinueAfterACheckpointAndAreTrainedOnOnce) {
  AsynchronousRun first(/*eta=*/3);
  first.trainer.pause = std::chrono::milliseconds(0);
  first.run([&] { return first.controller->num_steps() >= 3; });
  ASSERT_TRUE(first.checkpoints.saved);
  ASSERT_FALSE(first.checkpoints.saved->running.empty()) << "nothing was running";
  ProblemOrder order(first.problems, 1);
  const Json saved = Json::parse(to_json(*first.checkpoints.saved, order).dump());
  const int64_t steps = first.checkpoints.saved->step;

  AsynchronousRun second(/*eta=*/3);
  second.trainer.versions.clear();
  for (auto& version : first.trainer.versions) second.trainer.versions.push_back(copy_of(*version));
  for (size_t i = 0; i < second.model->parameters().size(); ++i)
    second.model->parameters()[i]->value.copy_(first.model->parameters()[i]->value);
  second.controller->restore(controller_state_from_json(saved, order));
  second.run();
  std::multiset<std::string> trained;
  int64_t of_both = 0;
  for (const AsynchronousRun* run : {&first, &second})
    for (const StepRecord& record : run->records)
      for (size_t i = 0; i < record.batch.size(); i += 4) trained.insert(*record.batch[i].prompt);
  for (const StepRecord& record : second.records) {
    EXPECT_LT(largest_error(second, record.batch, 0), 1e-4) << "step " << record.step;
    for (const Trajectory& sample : record.batch) {
      const std::set<int32_t> labels = labels_of(sample);
      of_both += *labels.begin() < steps && *labels.rbegin() >= steps;
    }
  }
  EXPECT_GT(of_both, 0) << "no sample has tokens of both processes";
  // 24 groups are three epochs of seven problems and three more: each problem three or four times.
  EXPECT_EQ(trained.size(), 24u);
  for (int64_t i = 0; i < 7; ++i) {
    const auto times = trained.count(str("Q", i, " "));
    EXPECT_TRUE(times == 3 || times == 4) << "problem " << i << ": " << times << " times";
  }
}

}  // namespace
}  // namespace bough

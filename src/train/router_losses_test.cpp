// Losses of a mixture's routers: every plan of a batch against the flat batch, and central differences.
#include "train/router_losses.h"

#include <gtest/gtest.h>

#include <random>

#include "train/flat_reference.h"
#include "train/gradient_step.h"
#include "train/ranks_test_util.h"

namespace bough {
namespace {

// Some seeds have only one of the losses.
RouterLossSettings coefficients_of(uint64_t seed) {
  return {.router_aux_loss_coef = seed % 4 == 1 ? 0 : 0.7, .router_z_loss_coef = seed % 4 == 2 ? 0 : 0.3};
}

// A mixture of at least two experts, of which a token does not use all, so that the load-balancing loss has a
// gradient.
ModelConfig mixture_config(uint64_t seed) {
  ModelConfig config = random_mixture_config(seed);
  config.num_experts += 2;
  return config;
}

void expect_flat_gradient(Model& model, FlatResult& flat, const Plan& plan, const TrainBatch& batch,
                          const Loss& loss, const ExecutorOptions& options, const std::string& what) {
  model.allocate_gradients();
  model.zero_gradients();
  const ExecutionResult result = Executor(model, options).execute(plan, batch, loss);
  ASSERT_NEAR(result.loss, flat.loss, 1e-10 * std::max(1.0, std::abs(flat.loss))) << what;
  ASSERT_LE(gradient_error(model, flat), 1e-10) << what;
  if (batch.num_rows() == 0) return;
  const auto expect_metric = [&](const char* name, double coefficient, double expected) {
    ASSERT_EQ(result.metrics.contains(name), coefficient > 0) << what;
    if (coefficient > 0) {
      ASSERT_NEAR(result.metrics.at(name).value(), expected, 1e-10 * std::max(1.0, expected)) << what;
    }
  };
  expect_metric("experts/aux_loss", options.router_losses.router_aux_loss_coef, flat.aux_loss);
  expect_metric("experts/z_loss", options.router_losses.router_z_loss_coef, flat.z_loss);
}

TEST(RouterLosses, EveryPlanHasTheFlatBatchsGradients) {
  const auto loss = full_loss();
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const int64_t max_tokens = seed % 40 == 0 ? 500 : 100;
    const auto r = random_batch(seed, max_tokens);
    const auto model = random_model(mixture_config(seed), seed, at::kDouble);
    FlatReference reference(*model);
    reference.add_router_losses(coefficients_of(seed));
    FlatResult flat = reference.run(r->batch, *loss);
    std::mt19937_64 random(seed);
    for (const std::string strategy : {"dense", "path", "blocks", "packed"})
      for (const int64_t limit : {1 + static_cast<int64_t>(random() % 8), int64_t{40}, int64_t{4096}}) {
        if (strategy == "packed" && limit < 4096) continue;
        const Plan plan = with_random_keeps(make_plan(strategy, plan_request(r->batch, limit)), random());
        expect_flat_gradient(*model, flat, plan, r->batch, *loss,
                             {.head_chunk_rows = 7,
                              .verify_recompute = random() % 2 == 0,
                              .router_losses = coefficients_of(seed)},
                             str(strategy, " seed ", seed, " B ", limit));
        if (testing::Test::HasFatalFailure()) return;
      }
  }
}

// A loss that couples tokens of several blocks has a plan execution for values of its own, which also counts
// the experts.
TEST(RouterLosses, AreAddedToLossesThatCoupleTokens) {
  LossSettings settings;
  settings.loss = "gspo";
  const auto loss = make_loss(settings);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto r = random_batch(seed, 100);
    const auto model = random_model(mixture_config(seed), seed, at::kDouble);
    FlatReference reference(*model);
    reference.add_router_losses(coefficients_of(seed));
    FlatResult flat = reference.run(r->batch, *loss);
    for (const std::string strategy : {"dense", "path", "blocks"}) {
      expect_flat_gradient(*model, flat, make_plan(strategy, plan_request(r->batch, 24)), r->batch, *loss,
                           {.router_losses = coefficients_of(seed)}, str(strategy, " seed ", seed));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// The experts' shares are those of all ranks. Each rank has its own plan.
TEST(RouterLosses, OfRanksAreThoseOfTheFlatBatch) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    const auto r = random_batch(seed, 100);
    LossSettings settings;
    settings.loss = seed % 3 == 0 ? "gspo" : "ppo";
    const auto loss = make_loss(settings);
    const auto whole = random_model(mixture_config(seed), seed, at::kDouble);
    FlatReference reference(*whole);
    reference.add_router_losses(coefficients_of(seed));
    FlatResult flat = reference.run(r->batch, *loss);
    const int64_t num_ranks = 2 + static_cast<int64_t>(seed % 2);
    on_rank_groups({.data = num_ranks}, *whole, [&](TrainingRanks& groups, Model& model) {
      model.allocate_gradients();
      const Plan plan = plan_shard(groups.replica() == 0 ? "blocks" : "path", plan_request(r->batch, 32),
                                   groups.replica(), num_ranks);
      const ExecutionResult result =
          Executor(model, {.router_losses = coefficients_of(seed), .ranks = groups.loss_group()})
              .execute(plan, r->batch, *loss);
      sum_gradients(model, groups.data_parallel_group());
      EXPECT_LE(gradient_error(model, flat), 1e-10) << num_ranks << " ranks, seed " << seed;
      if (r->batch.num_rows() == 0 || coefficients_of(seed).router_aux_loss_coef == 0) return;
      EXPECT_NEAR(result.metrics.at("experts/aux_loss").value(), flat.aux_loss, 1e-10 * flat.aux_loss)
          << seed;
    });
  }
}

// Recorded experts count as the choice, and the trainer's gradient has them also if the batch is cut into
// fixed shares (actor.deterministic).
TEST(RouterLosses, AreThoseOfTheRecordedExperts) {
  for (const uint64_t seed : {1, 2, 3, 4, 5, 6, 7, 8}) {
    const auto r = random_batch(seed, 100);
    const ModelConfig config = mixture_config(seed);
    const auto model = random_model(config, seed, at::kDouble);
    std::vector<const Trajectory*> rows;
    std::vector<RoutedExperts> records;
    for (Trajectory& trajectory : r->trajectories) {
      trajectory.routed_experts = {
          .num_layers = config.num_sparse_layers(), .num_chosen = config.experts_per_token, .experts = {}};
      for (size_t i = 0; i + 1 < trajectory.input_ids.size(); ++i)
        for (int64_t k = 0; k < config.num_sparse_layers() * config.experts_per_token; ++k)
          trajectory.routed_experts.experts.push_back(static_cast<uint16_t>(k % config.experts_per_token));
      trajectory.advantage = {1};
      trajectory.logprobs.assign(trajectory.input_ids.size(), -4);
      rows.push_back(&trajectory);
      records.push_back(trajectory.routed_experts);
    }
    ActorSettings settings;
    settings.routing_replay = "R3";
    settings.router_losses = coefficients_of(seed);
    for (const bool deterministic : {false, true}) {
      settings.deterministic = deterministic;
      GradientStep step(*model, {}, settings, nullptr);
      const TrainBatch batch = step.prepare_batch(rows, /*is_one_update=*/true, "blocks");
      FlatReference reference(*model);
      reference.replay(records);
      reference.add_router_losses(settings.router_losses);
      TrainBatch plain = batch;
      for (size_t s = 0; s < plain.sequences.size(); ++s) plain.sequences[s] = rows[s]->input_ids;
      plain.fields.proximal_log_probs_R = at::Tensor();
      FlatResult flat = reference.run(plain, *make_loss(settings.loss));
      model->allocate_gradients();
      model->zero_gradients();
      const ExecutionResult result = step.add_gradient(step.plan(batch, "blocks"), batch);
      EXPECT_LE(gradient_error(*model, flat), 1e-10) << "seed " << seed << (deterministic ? ", shares" : "");
      if (settings.router_losses.router_aux_loss_coef > 0) {
        EXPECT_NEAR(result.metrics.at("experts/aux_loss").value(), flat.aux_loss, 1e-10 * flat.aux_loss);
      }
    }
  }
}

// The load-balancing loss takes a constant for the experts' shares, so differences of the loss are compared
// with the gradient at these shares.
TEST(RouterLosses, HaveTheGradientOfCentralDifferences) {
  const auto r = random_batch(3, 60);
  const auto model = random_model(mixture_config(3), 3, at::kDouble);
  const Plan plan = make_plan("blocks", plan_request(r->batch, 24));
  LossSettings no_loss;
  no_loss.loss = "sft";
  const auto loss = make_loss(no_loss);
  TrainBatch batch = r->batch;
  batch.fields.weights_R = at::zeros_like(batch.fields.weights_R);
  const RouterLossSettings coefficients{.router_aux_loss_coef = 0.5, .router_z_loss_coef = 0.25};
  ExecutorOptions options{.router_losses = coefficients};
  options.expert_shares_E = Executor(*model, options).expert_shares(plan, batch);
  ASSERT_NEAR(options.expert_shares_E.sum().item<double>(),
              static_cast<double>(model->config().experts_per_token), 1e-12);
  const auto value = [&] {
    model->zero_gradients();
    const WeightedSums metrics = Executor(*model, options).execute(plan, batch, *loss).metrics;
    return coefficients.router_aux_loss_coef * metrics.at("experts/aux_loss").value() +
           coefficients.router_z_loss_coef * metrics.at("experts/z_loss").value();
  };
  value();
  std::vector<at::Tensor> gradients;
  for (Parameter* parameter : model->parameters()) gradients.push_back(parameter->main_grad.clone());
  const std::vector<Parameter*> parameters = model->parameters();
  auto generator = at::detail::createCPUGenerator(5);
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor& weight = parameters[i]->value;
    const at::Tensor before = weight.clone();
    const auto direction = at::randn(weight.sizes(), generator, weight.options());
    constexpr double kStep = 1e-6;  // a smaller error than 1e-7 from rounding and from the third derivative
    const auto at_step = [&](double step) {
      weight.copy_(before + step * direction);
      return value();
    };
    const double difference = (at_step(kStep) - at_step(-kStep)) / (2 * kStep);
    weight.copy_(before);
    const double expected = (gradients[i] * direction).sum().item<double>();
    EXPECT_NEAR(difference, expected, 1e-6 * std::max(1.0, std::abs(expected)))
        << parameters[i]->parts[0].name;
  }
}

// Two sequences of one prompt count its tokens twice, a sequence without a trained token counts none, and
// tokens after a sequence's last trained token count only for sequences that go on.
TEST(RouterLosses, CountTokensOncePerSequenceUpToItsLastTrainedToken) {
  const std::vector<Trajectory> rows = {trajectory_of({1, 2, 3, 4, 5}, {0, 0, 1, 1, 0}),
                                        trajectory_of({1, 2, 3, 6}, {0, 0, 1, 0}),
                                        trajectory_of({1, 2, 7}, {0, 0, 0})};
  const TrainBatch batch = make_batch(rows, {}, at::kDouble);
  for (const char* strategy : {"dense", "blocks"}) {
    const Plan plan = make_plan(strategy, plan_request(batch, 100));
    std::map<int32_t, int64_t> by_token;
    for (const PlannedTree& planned : plan.trees) {
      const std::vector<int64_t> counts = flat_counts(planned, batch);
      for (size_t t = 0; t < counts.size(); ++t) by_token[planned.tree->tokens[t]] += counts[t];
    }
    const std::map<int32_t, int64_t> expected = {{1, 2}, {2, 2}, {3, 2}, {4, 1}, {5, 0}, {6, 0}, {7, 0}};
    EXPECT_EQ(by_token, expected) << strategy;
  }
  ModelConfig config = mixture_config(1);
  EXPECT_DOUBLE_EQ(router_loss_scale(config, batch),
                   1.0 / static_cast<double>(7 * config.num_sparse_layers()));
}

}  // namespace
}  // namespace bough

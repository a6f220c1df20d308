// Recorded experts in training: every plan of a batch against the flat batch whose tokens use the recorded
// experts.
#include <gtest/gtest.h>

#include <random>

#include "train/critic.h"
#include "train/flat_reference.h"
#include "train/gradient_step.h"
#include "train/random_records.h"
#include "train/reference_comparison.h"

namespace bough {
namespace {

// Log-probabilities and gradients of every plan of `marked` equal those of the flat batch `plain`.
void expect_equal_to_flat(Model& model, const TrainBatch& plain, const TrainBatch& marked,
                          const std::vector<RoutedExperts>& records, uint64_t seed) {
  const auto loss = full_loss();
  FlatReference reference(model);
  reference.replay(records);
  FlatResult flat = reference.run(plain, *loss);
  for (const std::string strategy : {"dense", "path", "blocks", "packed"}) {
    model.allocate_gradients();
    model.zero_gradients();
    Executor executor(model, {.head_chunk_rows = 7, .verify_recompute = true, .replays_experts = true});
    const auto plan =
        with_random_keeps(make_plan(strategy, plan_request(marked, strategy == "packed" ? 1024 : 40)), seed);
    const ExecutionResult result = executor.execute(plan, marked, *loss);
    const std::string what = str("seed ", seed, ", ", strategy);
    ASSERT_NEAR(result.loss, flat.loss, 1e-10 * std::max(1.0, std::abs(flat.loss))) << what;
    if (plain.num_rows() > 0) {
      ASSERT_LE((result.values.log_probs_R - flat.log_probs_R).abs().max().item<double>(), 1e-10) << what;
    }
    ASSERT_LE(gradient_error(model, flat), 1e-10) << what;
  }
}

TEST(RoutingReplay, EveryPlanHasTheGradientOfTheRecordedExperts) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const auto r = random_batch(seed, 100);
    const ModelConfig config = random_mixture_config(seed);
    const auto model = random_model(config, seed, at::kDouble);
    set_records(r->trajectories, config);
    TrainBatch marked = r->batch;
    const RouteDifferences differences = mark_tokens(marked, pointers_of(r->trajectories), {.experts = true});
    EXPECT_EQ(differences.different, 0);
    expect_equal_to_flat(*model, r->batch, marked, records_of(r->trajectories), seed);
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Records of one prefix that differ, as after new weights between two samples: the sequences part.
TEST(RoutingReplay, SequencesWithDifferentRecordsPart) {
  int64_t num_parted = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const auto r = random_batch(seed, 100);
    ModelConfig config = random_mixture_config(seed);
    config.num_experts += 2;
    const auto model = random_model(config, seed, at::kDouble);
    set_records(r->trajectories, config);
    std::vector<Trajectory> others = r->trajectories;
    set_records(others, config, /*variant=*/1);
    for (size_t i = 0; i < others.size(); i += 2)
      r->trajectories[i].routed_experts = others[i].routed_experts;
    TrainBatch marked = r->batch;
    const RouteDifferences differences = mark_tokens(marked, pointers_of(r->trajectories), {.experts = true});
    num_parted += differences.different;
    if (differences.different > 0) {
      EXPECT_GT(build_prefix_tree(marked.sequences).num_tokens(),
                build_prefix_tree(r->batch.sequences).num_tokens());
    }
    expect_equal_to_flat(*model, r->batch, marked, records_of(r->trajectories), seed);
    if (testing::Test::HasFatalFailure()) return;
  }
  EXPECT_GT(num_parted, 100);
}

TEST(RoutingReplay, WithMajorityEqualPrefixesGetTheMostFrequentRecord) {
  ModelConfig config = random_mixture_config(1);
  config.num_experts = 6;
  config.experts_per_token = 2;
  std::vector<Trajectory> rows(3, trajectory_of({1, 2, 3, 4}, {0, 1, 1, 1}));
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].input_ids[3] = static_cast<int32_t>(4 + i);
    rows[i].group = "g";
  }
  set_records(rows, config);
  const std::vector<uint16_t> most(rows[0].routed_experts.row(1).begin(),
                                   rows[0].routed_experts.row(1).end());
  std::vector<Trajectory> other = rows;
  set_records(other, config, 1);
  rows[1].routed_experts = other[1].routed_experts;
  TrainBatch exact = make_batch(rows, {}, at::kDouble), majority = exact;
  const auto pointers = pointers_of(rows);
  EXPECT_EQ(mark_tokens(exact, pointers, {.experts = true}).different, 3);
  const RouteDifferences differences = mark_tokens(majority, pointers, {.experts = true, .majority = true});
  EXPECT_EQ(differences.rows, 9);
  EXPECT_EQ(differences.different, 3);
  EXPECT_EQ(build_prefix_tree(exact.sequences).num_tokens(), 3 + 3 + 3);  // the last token has no record
  EXPECT_EQ(build_prefix_tree(majority.sequences).num_tokens(), 3 + 3);
  const auto replayed = majority.replay_of(majority.sequences[1][1])->experts;
  EXPECT_TRUE(std::ranges::equal(replayed, most));
}

TEST(RoutingReplay, AFlippedRouteChangesTheLogProbabilities) {
  ModelConfig config = random_mixture_config(3);
  config.num_experts = 6;
  config.experts_per_token = 2;
  const auto model = random_model(config, 3, at::kDouble);
  std::vector<Trajectory> rows = {trajectory_of({1, 2, 3, 4, 5}, {0, 1, 1, 1, 1})};
  set_records(rows, config);
  const auto log_probs = [&] {
    TrainBatch batch = make_batch(rows, {}, at::kDouble);
    mark_tokens(batch, pointers_of(rows), {.experts = true});
    return Executor(*model, {.replays_experts = true})
        .execute_forward(make_plan("blocks", plan_request(batch, 40)), batch)
        .log_probs_R;
  };
  const at::Tensor before_R = log_probs();
  const auto row = rows[0].routed_experts.row(2);
  uint16_t other = 0;
  while (other == row[0] || other == row[1]) ++other;
  rows[0].routed_experts.experts[static_cast<size_t>(2 * rows[0].routed_experts.row_size())] = other;
  const at::Tensor change_R = (log_probs() - before_R).abs();
  // Token 2 is predicted by token 1, before the flip. An expert with other rows may round otherwise.
  EXPECT_LE(change_R[1].item<double>(), 1e-12);
  EXPECT_GT(change_R[2].item<double>(), 1e-6);  // token 3 by token 2
}

// Through the weights of the recorded experts, which are not those that the router would choose.
TEST(RoutingReplay, TheGradientIsThatOfCentralDifferences) {
  LossSettings settings;
  settings.loss = "sft";
  const auto loss = make_loss(settings);
  for (const uint64_t seed : {3, 4}) {  // with renormalised weights and without
    ModelConfig config = random_mixture_config(seed);
    config.num_experts = 6;
    config.experts_per_token = 2;
    config.renormalises_experts = seed == 3;
    const auto model = random_model(config, seed, at::kDouble);
    const auto r = random_batch(seed, 60);
    set_records(r->trajectories, config);
    TrainBatch batch = r->batch;
    mark_tokens(batch, pointers_of(r->trajectories), {.experts = true});
    const Plan plan = make_plan("blocks", plan_request(batch, 24));
    const auto execute = [&] {
      model->zero_gradients();
      return Executor(*model, {.replays_experts = true}).execute(plan, batch, *loss);
    };
    model->allocate_gradients();
    EXPECT_GT(execute().metrics.at("experts/routes_differ").value(), 0.5);
    const std::vector<Parameter*> parameters = model->parameters();
    std::vector<at::Tensor> gradients;
    for (const Parameter* parameter : parameters) gradients.push_back(parameter->main_grad.clone());
    auto generator = at::detail::createCPUGenerator(seed);
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor& weight = parameters[i]->value;
      const at::Tensor before = weight.clone();
      const auto direction = at::randn(weight.sizes(), generator, weight.options());
      constexpr double kStep = 1e-6;
      const auto loss_at = [&](double step) {
        weight.copy_(before + step * direction);
        return execute().loss;
      };
      const double difference = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
      weight.copy_(before);
      const double expected = (gradients[i] * direction).sum().item<double>();
      EXPECT_NEAR(difference, expected, 1e-6 * std::max(1.0, std::abs(expected)))
          << parameters[i]->parts[0].name << ", seed " << seed;
      if (parameters[i]->parts[0].name.find("mlp.gate.") != std::string::npos) {
        EXPECT_GT(gradients[i].norm().item<double>(), 1e-3);
      }
    }
  }
}

// A critic on the policy's backbone: the values that advantages are computed from are those of the pass that
// trains.
TEST(RoutingReplay, ValuesOnTheSharedBackboneUseTheRecordedExperts) {
  ModelConfig config = random_mixture_config(3);
  config.num_experts = 6;
  config.experts_per_token = 2;
  const auto model = random_model(config, 3, at::kDouble);
  const auto r = random_batch(3, 60);
  set_records(r->trajectories, config);
  ActorSettings settings;
  settings.routing_replay = "R3";
  CriticSettings critic_settings;
  critic_settings.share_backbone = true;
  Critic critic(*model, critic_settings, settings, 10);
  critic.head().weight.value.fill_(0.5);
  GradientStep step(*model, {}, settings, nullptr);
  TrainBatch batch = step.rows_of(pointers_of(r->trajectories));
  batch.fields = r->batch.fields;
  const at::Tensor values_R = critic.values(batch);
  batch.old_values_R = batch.returns_R = at::zeros_like(values_R);
  model->allocate_gradients();
  model->zero_gradients();
  ValueBlockHead head = critic.beside_policy(batch);
  step.add_gradient(step.plan(batch, "blocks"), batch, &head);
  EXPECT_LE((critic.result_of(head).values_R - values_R).abs().max().item<double>(), 1e-12);
}

// R2: the records of the trainer's own pass, replayed after the weights have changed.
TEST(RoutingReplay, TheTrainersOwnRecordsAreReplayedUnderOtherWeights) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto r = random_batch(seed, 100);
    const ModelConfig config = random_mixture_config(seed);
    const auto model = random_model(config, seed, at::kDouble);
    std::vector<RoutedExperts> records(r->batch.sequences.size());
    Executor(*model).execute_forward(make_plan("blocks", plan_request(r->batch, 40)), r->batch,
                                     {.routed_experts = &records});
    const auto before = FlatReference(*model).run(r->batch, *full_loss());
    FlatReference replayed(*model);
    replayed.replay(records);
    if (r->batch.num_rows() > 0) {
      EXPECT_LE(
          (replayed.run(r->batch, *full_loss()).log_probs_R - before.log_probs_R).abs().max().item<double>(),
          1e-12);
    }
    const auto other = random_model(config, seed + 1, at::kDouble);
    TrainBatch marked = r->batch;
    marked.routed_experts = std::make_shared<const std::vector<RoutedExperts>>(records);
    mark_tokens(marked, pointers_of(r->trajectories), {.experts = true});
    expect_equal_to_flat(*other, r->batch, marked, records, seed);
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace bough

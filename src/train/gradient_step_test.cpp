// Tests the way from the trajectories of a rollout file to loss weights, advantages and a gradient.
#include "train/gradient_step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "train/small_model.h"
#include "train/trainer.h"

namespace bough {
namespace {

Trajectory row(const std::string& group, double reward, std::vector<int32_t> ids, size_t prompt) {
  Trajectory out;
  out.group = group;
  out.reward = reward;
  out.loss_mask.assign(ids.size(), 1);
  std::fill_n(out.loss_mask.begin(), prompt, 0);
  out.logprobs.assign(ids.size(), 0);
  for (size_t i = prompt; i < ids.size(); ++i) out.logprobs[i] = -3.5f + 0.1f * static_cast<float>(i);
  out.input_ids = std::move(ids);
  return out;
}

// The batch has two groups, with responses of one, two, three and five tokens.
std::vector<Trajectory> small_batch() {
  return {row("a", 1, {1, 2, 3, 4}, 3), row("a", 0, {1, 2, 3, 5, 6}, 3), row("b", 2, {7, 8, 9, 10}, 1),
          row("b", -1, {7, 8, 9, 10, 11, 12}, 1)};
}

std::vector<double> list(const at::Tensor& x) {
  const at::Tensor y = x.to(at::kDouble).contiguous();
  return {y.const_data_ptr<double>(), y.const_data_ptr<double>() + y.numel()};
}

AggregationSettings aggregation(const std::string& how) {
  return {.loss_aggregation = how, .loss_constant_length = 10};
}

TEST(MakeBatch, RowsOfTheLossAreTheTrainedTokens) {
  std::vector<Trajectory> batch = small_batch();
  batch[0].advantage = {0.5f};
  batch[1].advantage = {0, 0, 0, -1, 2};
  batch[2].trained = false;
  batch[3].valid = false;
  batch[0].loss_mask[0] = 1;  // nothing predicts position 0
  const TrainBatch made = make_batch(batch, {}, at::kDouble);
  ASSERT_EQ(made.sequences.size(), 2u) << "rows that are not trained or not valid are left out";
  EXPECT_EQ(made.trained_positions, (std::vector<std::vector<int32_t>>{{3}, {3, 4}}));
  EXPECT_EQ(made.row_offset, (std::vector<int64_t>{0, 1, 3}));
  EXPECT_EQ(list(made.fields.advantages_R), (std::vector<double>{0.5, -1, 2}));
  EXPECT_EQ(list(made.fields.behaviour_log_probs_R),
            (std::vector<double>{batch[0].logprobs[3], batch[1].logprobs[3], batch[1].logprobs[4]}));
  EXPECT_EQ(list(made.fields.weights_R), std::vector<double>(3, 1.0 / 3));
  EXPECT_EQ(list(made.fields.sequences_R), (std::vector<double>{0, 1, 1}));
  EXPECT_EQ(trained_flags(batch).size(), 19u);
  const TrainBatch none = make_batch(std::vector<const Trajectory*>{}, {}, at::kDouble);
  EXPECT_EQ(none.num_rows(), 0);
  EXPECT_FALSE(none.fields.advantages_R.defined());
}

TEST(MakeBatch, RefusesInvalidBatches) {
  std::vector<Trajectory> batch = small_batch();
  batch[1].temperature = 0.7;
  EXPECT_THROW(make_batch(batch, {}, at::kDouble), InternalError);
  batch = small_batch();
  batch[1].loss_mask.pop_back();
  EXPECT_THROW(make_batch(batch, {}, at::kDouble), InternalError);
  batch = small_batch();
  batch[1].advantage = {1, 2};
  EXPECT_THROW(make_batch(batch, {}, at::kDouble), InternalError);
  batch = small_batch();
  batch[1].logprobs.clear();
  EXPECT_THROW(make_batch(batch, {}, at::kDouble), InternalError);
}

// The batch has one conversation of two rows, with one and two trained tokens, and a sequence with three.
// Each of the two rows has half of a sequence's weight in every aggregation.
TEST(MakeBatch, RowsOfATrajectoryShareOneSequencesWeight) {
  std::vector<Trajectory> batch = {row("g", 1, {1, 2, 4}, 2), row("g", 1, {1, 2, 3, 5}, 2),
                                   row("g", 0, {1, 2, 3, 4, 5}, 2)};
  batch[0].trajectory = batch[1].trajectory = "t";
  const auto weights = [&](const std::string& how) {
    return list(make_batch(batch, aggregation(how), at::kDouble).fields.weights_R);
  };
  const auto expect_near = [](const std::vector<double>& got, const std::vector<double>& expected) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-15) << i;
  };
  const double tokens = 0.5 * 1 + 0.5 * 2 + 3, w = 1 / tokens;
  expect_near(weights("token_mean"), {w / 2, w / 2, w / 2, w, w, w});
  expect_near(weights("group_mean"), {w / 2, w / 2, w / 2, w, w, w});
  expect_near(weights("sequence_mean"), {0.25, 0.125, 0.125, 1.0 / 6, 1.0 / 6, 1.0 / 6});
  expect_near(weights("constant_length"), {0.025, 0.025, 0.025, 0.05, 0.05, 0.05});
  // A row of the batch without trained tokens takes no weight from the conversation's second row.
  batch[0].loss_mask.assign(3, 0);
  expect_near(weights("sequence_mean"), {0.25, 0.25, 1.0 / 6, 1.0 / 6, 1.0 / 6});
}

std::vector<const Trajectory*> pointers_to(const std::vector<Trajectory>& batch) {
  std::vector<const Trajectory*> out;
  for (const Trajectory& trajectory : batch) out.push_back(&trajectory);
  return out;
}

// The gradients of all parameters, concatenated.
at::Tensor flat_gradient(Model& model, FrozenModels frozen, const ActorSettings& settings,
                         const std::vector<Trajectory>& batch, ExecutionResult* result = nullptr) {
  model.allocate_gradients();
  model.zero_gradients();
  GradientStep step(model, frozen, settings, nullptr);
  const TrainBatch prepared = step.prepare_batch(pointers_to(batch), true, "path");
  const ExecutionResult execution = step.add_gradient(step.plan(prepared, "path"), prepared);
  if (result) *result = execution;
  std::vector<at::Tensor> all;
  for (Parameter* parameter : model.parameters())
    all.push_back(parameter->main_grad.flatten().to(at::kDouble));
  return at::cat(all);
}

TEST(GradientStep, ATeacherThatIsThePolicyAddsNothing) {
  auto model = small_model(at::kDouble, 1), same = small_model(at::kDouble, 1),
       other = small_model(at::kDouble, 2);
  std::vector<Trajectory> batch = small_batch();
  ActorSettings settings;
  set_advantages(batch, settings, {});
  const at::Tensor without = flat_gradient(*model, {}, settings, batch);
  settings.loss.teacher.path = "t";
  settings.loss.teacher.topk = 6;
  for (const char* mode : {"k1", "k2", "k3", "topk"}) {
    settings.loss.teacher.loss_mode = mode;
    ExecutionResult result;
    const at::Tensor with = flat_gradient(*model, {nullptr, same.get()}, settings, batch, &result);
    EXPECT_LE((with - without).abs().max().item<double>(), 1e-9 * without.abs().max().item<double>()) << mode;
    EXPECT_NEAR(result.metrics.at("teacher/kl_k3").value(), 0, 1e-12);
    const at::Tensor moved = flat_gradient(*model, {nullptr, other.get()}, settings, batch, &result);
    EXPECT_GT((moved - without).abs().max().item<double>(), 1e-3) << mode;
    EXPECT_GT(result.metrics.at("teacher/kl_k3").value(), 1e-3);
  }
  EXPECT_THROW(GradientStep(*model, {}, settings, nullptr), UserError);
}

// Each token's advantage is reduced by the KL of this token and of all later tokens of its sequence, under
// the policy before the update.
TEST(GradientStep, KlInTheRewardGoesToTheTokensBefore) {
  auto model = small_model(at::kDouble, 1), reference = small_model(at::kDouble, 2);
  std::vector<Trajectory> batch = small_batch();
  ActorSettings settings;
  set_advantages(batch, settings, {});
  settings.loss.kl_ctl = 0.25;
  settings.loss.kl_ctrl.type = "adaptive";
  GradientStep step(*model, reference.get(), settings, nullptr);
  const TrainBatch prepared = step.prepare_batch(pointers_to(batch), true, "path");
  const TrainBatch plain = make_batch(batch, {}, at::kDouble);
  const auto own = list(Executor(*model).execute_forward(step.plan(plain, "path"), plain).log_probs_R);
  const auto other = list(Executor(*reference).execute_forward(step.plan(plain, "path"), plain).log_probs_R);
  const auto before = list(plain.fields.advantages_R), after = list(prepared.fields.advantages_R);
  double kl = 0;
  for (size_t s = 0; s + 1 < plain.row_offset.size(); ++s) {
    const auto begin = static_cast<size_t>(plain.row_offset[s]),
               end = static_cast<size_t>(plain.row_offset[s + 1]);
    double to_go = 0;
    for (size_t r = end; r-- > begin;) {
      to_go += std::clamp(own[r] - other[r], -kMaxLogRatio, kMaxLogRatio);
      EXPECT_NEAR(after[r], before[r] - 0.25 * to_go, 1e-12) << r;
    }
    kl += to_go / static_cast<double>(end - begin) / 4;
  }
  const MetricValues values = step.finish({});
  EXPECT_EQ(values.at("kl_ctl/coef"), 0.25);
  EXPECT_NEAR(values.at("kl_ctl/kl"), kl, 1e-12);
  const double moved = 0.25 * (1 + std::clamp(kl / 0.1 - 1, -0.2, 0.2) * 4 / 10000);
  GradientStep resumed(*model, reference.get(), settings, nullptr);
  resumed.restore(step.state());
  EXPECT_EQ(resumed.finish({}).at("kl_ctl/coef"), moved);
  settings.advantages.adv_estimator = "reinforce_plus_plus_baseline";
  EXPECT_THROW(GradientStep(*model, reference.get(), settings, nullptr), UserError);
}

TEST(GradientStep, TheReferenceIsRenewedInItsTurn) {
  auto model = small_model(at::kDouble, 1), reference = small_model(at::kDouble, 2),
       old = small_model(at::kDouble, 2);
  ActorSettings settings;
  settings.loss.kl_loss_coef = 0.1;
  settings.loss.ref_model_sync_steps = 3;
  settings.loss.ref_model_mixup_alpha = 0.25;
  GradientStep step(*model, reference.get(), settings, nullptr);
  const auto weight = [](Model& of) { return of.parameters()[0]->value; };
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::equal(weight(*reference), weight(*old))) << i;
    EXPECT_EQ(step.finish({}).at("policy/reference_renewed"), i == 2);
  }
  const at::Tensor mixed = 0.25 * weight(*model) + 0.75 * weight(*old);
  EXPECT_LE((weight(*reference) - mixed).abs().max().item<double>(), 1e-14);
  step.set_version(4);
  EXPECT_EQ(step.finish({}).at("policy/reference_renewed"), 0);
  step.set_version(5);
  EXPECT_EQ(step.finish({}).at("policy/reference_renewed"), 1);
}

TEST(GradientStep, ObrsNeedsTheEnginesMostLikelyTokens) {
  auto model = small_model(at::kDouble, 1);
  std::vector<Trajectory> batch = small_batch();
  ActorSettings settings;
  set_advantages(batch, settings, {});
  settings.loss.correction = "obrs";
  GradientStep step(*model, {}, settings, nullptr);
  EXPECT_THROW(step.prepare_batch(pointers_to(batch), true, "path"), UserError);
  ActorSettings without_z = settings;
  without_z.loss.obrs_normalizer = "none";
  const TrainBatch plain =
      GradientStep(*model, {}, without_z, nullptr).prepare_batch(pointers_to(batch), true, "path");
  EXPECT_EQ(plain.fields.rows_R.numel(), plain.num_rows());
  EXPECT_FALSE(plain.top_k_ids_RK.defined());
  for (Trajectory& row : batch) {
    row.top_ids.resize(row.input_ids.size());
    row.top_logprobs.resize(row.input_ids.size());
    for (size_t i = 1; i < row.input_ids.size(); ++i)
      if (row.trains(i)) row.top_ids[i] = {7, 9}, row.top_logprobs[i] = {-0.5f, -1.5f};
  }
  batch[0].top_ids[3].pop_back();
  batch[0].top_logprobs[3].pop_back();
  const TrainBatch prepared = step.prepare_batch(pointers_to(batch), true, "path");
  EXPECT_EQ(prepared.top_k_ids_RK.sizes(), (std::vector<int64_t>{prepared.num_rows(), 2}));
  EXPECT_EQ(list(prepared.fields.behaviour_top_k_RK[1]), (std::vector<double>{-0.5, -1.5}));
  EXPECT_EQ(list(prepared.fields.behaviour_top_k_RK[0])[1], -std::numeric_limits<double>::infinity());
  batch[1].top_ids[4][1] = 40;
  EXPECT_THROW(step.prepare_batch(pointers_to(batch), true, "path"), UserError);
}

TEST(SetAdvantages, AreThoseOfTheEstimatorInsideEachGroup) {
  std::vector<Trajectory> batch = small_batch();
  ActorSettings settings;
  settings.advantages.adv_estimator = "rloo";
  set_advantages(batch, settings, {});
  EXPECT_EQ(batch[0].advantage, std::vector<float>{1});
  EXPECT_EQ(batch[1].advantage, std::vector<float>{-1});
  EXPECT_EQ(batch[2].advantage, std::vector<float>{3});
  EXPECT_EQ(batch[3].advantage, std::vector<float>{-3});

  batch = small_batch();
  batch[0].advantage = {7};  // set by the caller; its reward still counts in the group's mean
  batch[2].reward.reset();
  batch[2].advantage = {5};  // no reward: counts in no mean
  settings.advantages.adv_estimator = "dr_grpo";
  set_advantages(batch, settings, {});
  EXPECT_EQ(batch[0].advantage, std::vector<float>{7});
  EXPECT_EQ(batch[1].advantage, std::vector<float>{-0.5f});
  EXPECT_EQ(batch[2].advantage, std::vector<float>{5});
  EXPECT_EQ(batch[3].advantage, std::vector<float>{0});
}

TEST(SetAdvantages, InvalidRowsAreNotInMeanDeviationAndLoss) {
  std::vector<Trajectory> with = small_batch(), without = with;
  with.insert(with.begin() + 1, row("a", 100, {1, 2, 3, 9}, 3));
  with[1].valid = false;
  set_advantages(with, {}, {});
  set_advantages(without, {}, {});
  EXPECT_EQ(with[0].advantage, without[0].advantage);
  EXPECT_EQ(with[2].advantage, without[1].advantage);
  EXPECT_EQ(list(make_batch(with, {}, at::kDouble).fields.weights_R),
            list(make_batch(without, {}, at::kDouble).fields.weights_R));
  // The failed reward leaves one sequence in group a. This sequence has no baseline, so its group is dropped.
  with = small_batch();
  with[0].valid = false;
  with[0].reward.reset();
  const FilterResult counts = set_advantages(with, {}, {});
  EXPECT_FALSE(with[1].trained);
  EXPECT_TRUE(with[2].trained);
  EXPECT_EQ(counts.groups_dropped, 1);
  EXPECT_EQ(counts.sequences_dropped, 2);
  EXPECT_EQ(make_batch(with, {}, at::kDouble).sequences.size(), 2u);
}

TEST(SetAdvantages, ATrajectoryCountsOnceInItsGroup) {
  std::vector<Trajectory> batch = {row("g", 1, {1, 2, 4}, 2), row("g", 1, {1, 2, 3, 5}, 2),
                                   row("g", 0, {1, 2, 3, 4, 5}, 2)};
  batch[0].trajectory = batch[1].trajectory = "t";
  ActorSettings settings;
  settings.advantages.adv_estimator = "dr_grpo";
  set_advantages(batch, settings, {});
  EXPECT_EQ(batch[0].advantage, std::vector<float>{0.5f});
  EXPECT_EQ(batch[1].advantage, std::vector<float>{0.5f});
  EXPECT_EQ(batch[2].advantage, std::vector<float>{-0.5f});
  batch[1].reward = 0.75;
  EXPECT_THROW(set_advantages(batch, settings, {}), UserError);
}

TEST(SetAdvantages, AdvantagesByTokenRunThroughATrajectorysRows) {
  std::vector<Trajectory> batch = {row("g", 1, {1, 2, 4}, 2), row("g", 1, {1, 2, 3, 5}, 2),
                                   row("g", 0, {1, 2, 3, 4, 5}, 2)};
  batch[0].trajectory = batch[1].trajectory = "t";
  ActorSettings settings;
  settings.advantages.adv_estimator = "reinforce_plus_plus";
  settings.advantages.discount = 0.5;
  set_advantages(batch, settings, {});
  // Returns are 1/4, 1/2, 1 on the three tokens of conversation "t", and 0 on the three of the second one.
  const double mean = 1.75 / 6, squares = 1.0 / 16 + 1.0 / 4 + 1 - 6 * mean * mean;
  const auto whitened = [&](double x) {
    return static_cast<float>((x - mean) / std::sqrt(squares / 5 + 1e-8));
  };
  ASSERT_EQ(batch[0].advantage.size(), 3u);
  EXPECT_FLOAT_EQ(batch[0].advantage[2], whitened(0.25));
  EXPECT_FLOAT_EQ(batch[1].advantage[2], whitened(0.5));
  EXPECT_FLOAT_EQ(batch[1].advantage[3], whitened(1));
  EXPECT_FLOAT_EQ(batch[2].advantage[4], whitened(0));
  EXPECT_EQ(make_batch(batch, {}, at::kDouble).num_rows(), 6);
}

TEST(SetAdvantages, AGroupIsDroppedIfFiltersLeaveNothing) {
  std::vector<Trajectory> group = {row("a", 1, {1, 2, 3, 4}, 3), row("a", 1, {1, 2, 3, 5, 6}, 3)};
  ActorSettings settings;
  EXPECT_EQ(why_dropped(group, settings, {}), std::nullopt);
  settings.filters.dynamic_sampling = true;
  EXPECT_EQ(why_dropped(group, settings, {}), "equal rewards");
  group[1].reward = 0;
  EXPECT_EQ(why_dropped(group, settings, {}), std::nullopt);
  group[1].valid = false;
  EXPECT_EQ(why_dropped(group, settings, {}), "nothing left") << "one sample";
}

TEST(SetAdvantages, ShapingAndFiltersAct) {
  std::vector<Trajectory> batch = small_batch();
  ActorSettings settings;
  settings.advantages.adv_estimator = "dr_grpo";
  settings.shaping.reward_clip = 1;
  settings.filters.truncated_samples = "mask";
  batch[0].finish_reason = "length";
  const FilterResult counts = set_advantages(batch, settings, {});
  EXPECT_EQ(counts.truncated, 1);
  EXPECT_FALSE(batch[0].trained);
  EXPECT_TRUE(batch[1].trained);
  EXPECT_EQ(batch[2].advantage, std::vector<float>{1}) << "a reward of 2 is cut to 1";
  settings.shaping.overlong_reward_penalty = true;
  EXPECT_THROW(set_advantages(batch, settings, {}), UserError) << "how long may a response be?";
  EXPECT_NO_THROW(set_advantages(batch, settings, 8));
}

// Sets the versions of generated tokens. Each sequence of group a has one token of version 1.
std::vector<Trajectory> batch_of_ages() {
  std::vector<Trajectory> batch = small_batch();
  for (Trajectory& trajectory : batch)
    for (size_t i = 0; i < trajectory.input_ids.size(); ++i)
      trajectory.versions.push_back(trajectory.loss_mask[i] ? 5 : -1);
  batch[0].versions[3] = 1;
  batch[1].versions[4] = 1;
  return batch;
}

TEST(TokenAge, TokensThatAreTooOldHaveNoAdvantageAndStayInTheDenominator) {
  const std::vector<Trajectory> all = batch_of_ages();
  std::vector<Trajectory> kept = all, masked = all;
  set_advantages(kept, {}, {}, {.version = 5, .max_age = 3, .action = "keep"});
  EXPECT_EQ(kept[1].advantage.size(), 1u);
  const FilterResult counts = set_advantages(masked, {}, {}, {.version = 5, .max_age = 3, .action = "mask"});
  EXPECT_EQ(counts.masked_tokens, 2);
  EXPECT_EQ(masked[0].advantage[3], 0);
  EXPECT_EQ(masked[1].advantage[3], kept[1].advantage[0]);
  EXPECT_EQ(masked[1].advantage[4], 0);
  EXPECT_EQ(masked[2].advantage, kept[2].advantage);
  EXPECT_EQ(list(make_batch(masked, {}, at::kDouble).fields.weights_R),
            list(make_batch(kept, {}, at::kDouble).fields.weights_R));
  masked = all;
  EXPECT_EQ(set_advantages(masked, {}, {}, {.version = 5, .max_age = 4, .action = "mask"}).masked_tokens, 0)
      << "an age of 4 is not more than 4";
  EXPECT_EQ(masked[1].advantage, kept[1].advantage);
}

TEST(TokenAge, AGroupWithATokenThatIsTooOldIsDropped) {
  std::vector<Trajectory> batch = batch_of_ages();
  batch[1].versions[4] = 5;   // one old sample of the two is enough
  batch.push_back(batch[1]);  // a row with a given advantage is dropped, too
  batch.back().reward.reset();
  batch.back().advantage = {1};
  const FilterResult counts =
      set_advantages(batch, {}, {}, {.version = 5, .max_age = 3, .action = "drop_group"});
  EXPECT_EQ(counts.stale_groups, 1);
  EXPECT_EQ(counts.groups_dropped, 1);
  EXPECT_EQ(counts.sequences_dropped, 2);
  for (const size_t s : {0, 1, 4}) EXPECT_FALSE(batch[s].trained) << s;
  for (const size_t s : {2, 3}) EXPECT_TRUE(batch[s].trained) << s;
}

TEST(TokenAge, MetricsAreOverTheTokensOfTheLoss) {
  std::vector<Trajectory> batch = batch_of_ages();  // 2 tokens of version 1, 9 of version 5
  MetricValues metrics = age_metrics(batch, 6);
  EXPECT_DOUBLE_EQ(metrics.at("age/mean"), (2 * 5 + 9 * 1) / 11.0);
  EXPECT_EQ(metrics.at("age/max"), 5);
  EXPECT_EQ(metrics.at("age_1/tokens"), 9);
  EXPECT_EQ(metrics.at("age_5_to_8/tokens"), 2);
  EXPECT_EQ(metrics.size(), 4u) << "an age that no token has";
  batch[0].trained = batch[1].valid = false;
  metrics = age_metrics(batch, 6);
  EXPECT_EQ(metrics.at("age/mean"), 1);
  EXPECT_EQ(metrics.at("age/max"), 1);
  batch[2].versions.clear();
  EXPECT_EQ(age_metrics(batch, 6).at("age/mean"), 1) << "a version that is not known has no age";
  EXPECT_EQ(age_metrics({}, 6).at("age/max"), 0);
}

ActorSettings settings_of(const std::string& how) {
  ActorSettings settings;
  settings.tree.tree_training_mode = "path";
  settings.aggregation = aggregation(how);
  settings.optimizer.lr = 0;
  return settings;
}

TEST(StepTimer, TakesTheTrainersGradientWhateverTheAggregation) {
  std::vector<Trajectory> batch = small_batch();
  set_advantages(batch, {}, {});
  const SteadyClock clock;
  std::vector<double> losses;
  for (const char* how : {"token_mean", "sequence_mean", "constant_length", "group_mean"}) {
    const auto model = small_model(at::kDouble);
    const ActorSettings settings = settings_of(how);
    StepTimer timer(*model, nullptr, settings, batch, {.strategy = "path"});
    timer.run(/*counted=*/false);
    double squares = 0;
    for (Parameter* parameter : model->parameters())
      squares += parameter->main_grad.square().sum().item<double>();
    model->zero_gradients();
    Trainer trainer(*model, nullptr, settings, 10, clock);
    const MetricValues metrics = trainer.train_step(batch);
    EXPECT_NEAR(timer.loss(), metrics.at("loss/policy"), 1e-12) << how;
    EXPECT_NEAR(std::sqrt(squares), metrics.at("optim/grad_norm"), 1e-9) << how;
    losses.push_back(timer.loss());
  }
  for (size_t i = 1; i < losses.size(); ++i) EXPECT_GT(std::abs(losses[i] - losses[0]), 1e-3) << i;
}

TEST(StepTimer, ChangesNoWeightsAndRepeatsItsGradient) {
  std::vector<Trajectory> batch = small_batch();
  set_advantages(batch, {}, {});
  const auto model = small_model(at::kDouble), untouched = small_model(at::kDouble);
  const ActorSettings settings = settings_of("token_mean");
  StepTimer shared(*model, nullptr, settings, batch, {.strategy = "path"}),
      dense(*model, nullptr, settings, batch, {.strategy = "dense"});
  shared.run(/*counted=*/false);
  std::vector<at::Tensor> gradients;
  for (Parameter* parameter : model->parameters()) gradients.push_back(parameter->main_grad.clone());
  dense.run(/*counted=*/true);
  shared.run(/*counted=*/true);
  shared.run(/*counted=*/true);
  EXPECT_EQ(shared.seconds().size(), 2u);
  EXPECT_EQ(dense.seconds().size(), 1u);
  EXPECT_GT(shared.median_seconds(), 0);
  EXPECT_EQ(shared.strategy(), "path");
  EXPECT_EQ(shared.num_trained(), 11);
  EXPECT_NEAR(shared.loss(), dense.loss(), 1e-12);
  const auto parameters = model->parameters(), others = untouched->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(at::equal(parameters[i]->main_grad, gradients[i])) << i;
    EXPECT_TRUE(at::equal(parameters[i]->value, others[i]->value)) << i;
  }
  for (Trajectory& trajectory : batch) trajectory.trained = false;
  StepTimer nothing(*model, nullptr, settings, batch, {.strategy = "auto"});
  nothing.run(/*counted=*/true);
  EXPECT_EQ(nothing.loss(), 0);
}

}  // namespace
}  // namespace bough

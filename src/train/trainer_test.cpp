#include "train/trainer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <tuple>

#include "base/error.h"
#include "train/flat_reference.h"
#include "train/small_model.h"

namespace bough {
namespace {

// Groups of four samples: a prompt of five tokens, then three tokens of each sample.
std::vector<Trajectory> batch_of(int64_t groups) {
  std::vector<Trajectory> batch;
  for (int32_t g = 0; g < groups; ++g) {
    for (int32_t i = 0; i < 4; ++i) {
      Trajectory rollout;
      rollout.group = str("g", g);
      rollout.input_ids = {1, 2, 3, 4, 5 + g, 10 + i, 20 + (i + g) % 3, 30};
      rollout.loss_mask = {0, 0, 0, 0, 0, 1, 1, 1};
      rollout.logprobs = {0, 0, 0, 0, 0, -3.5f, -3.4f, -3.3f};
      rollout.advantage = {i % 2 ? 1.0f : -1.0f + 0.1f * static_cast<float>(g)};
      batch.push_back(std::move(rollout));
    }
  }
  return batch;
}

ActorSettings settings_with(const std::string& mode, int64_t mini_batches = 1) {
  ActorSettings settings;
  settings.tree.tree_training_mode = mode;
  settings.ppo_n_minibatches = mini_batches;
  settings.optimizer.lr = 1e-2;
  settings.optimizer.warmup_steps_proportion = 0;
  settings.loss.behave_imp_weight_cap = {};
  return settings;
}

std::vector<at::Tensor> values_of(Model& model) {
  std::vector<at::Tensor> values;
  for (Parameter* parameter : model.parameters()) values.push_back(parameter->value.clone());
  return values;
}

double largest_difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, a[i].sub(b[i]).abs().max().item<double>());
  return largest;
}

TEST(Trainer, SharingChangesTheWorkAndNotTheUpdate) {
  const SteadyClock clock;
  const std::vector<Trajectory> batch = batch_of(3);
  const auto tree = small_model(at::kDouble), flat = small_model(at::kDouble);
  Trainer tree_trainer(*tree, nullptr, settings_with("path"), 10, clock);
  Trainer flat_trainer(*flat, nullptr, settings_with("dense"), 10, clock);
  const MetricValues a = tree_trainer.train_step(batch), b = flat_trainer.train_step(batch);
  EXPECT_NEAR(a.at("loss/policy"), b.at("loss/policy"), 1e-9);
  EXPECT_NEAR(a.at("optim/grad_norm"), b.at("optim/grad_norm"), 1e-9);
  EXPECT_EQ(a.at("tree/compression"), 96.0 / (4 + 3 + 3 * 4 * 3));
  EXPECT_EQ(a.at("optim/lr"), 1e-2);
  EXPECT_GT(largest_difference(values_of(*tree), values_of(*small_model(at::kDouble))), 1e-3);
}

// AReaL's metric: the tokens of all trees divided by the tokens of the sequences. One group is a tree of 17
// tokens, 5 + 4 x 3. Three groups, planned separately, repeat their 4 common tokens.
TEST(Trainer, TreeTokenRatioCountsThePlansTrees) {
  const SteadyClock clock;
  const auto ratio = [&](const ActorSettings& settings) {
    const auto model = small_model(at::kDouble);
    return Trainer(*model, nullptr, settings, 10, clock).train_step(batch_of(3)).at("tree_token_ratio");
  };
  EXPECT_DOUBLE_EQ(ratio(settings_with("path")), (4 + 3 + 3 * 4 * 3) / 96.0);
  EXPECT_DOUBLE_EQ(ratio(settings_with("dense")), 1);
  ActorSettings packed = settings_with("packed");
  packed.mb_spec.max_tokens_per_mb = 17;
  EXPECT_DOUBLE_EQ(ratio(packed), 3 * (5 + 4 * 3) / 96.0);
  ActorSettings by_group = settings_with("path", /*mini_batches=*/3);
  EXPECT_DOUBLE_EQ(ratio(by_group), 3 * (5 + 4 * 3) / 96.0);
  ActorSettings off = settings_with("auto");
  off.tree.enable_tree_training = false;
  EXPECT_DOUBLE_EQ(ratio(off), 1);
}

TEST(Trainer, UntrainedSequencesAndEmptyBatchesChangeNothing) {
  const SteadyClock clock;
  const auto model = small_model(at::kDouble), other = small_model(at::kDouble);
  Trainer trainer(*model, nullptr, settings_with("path"), 10, clock);
  std::vector<Trajectory> none = batch_of(1);
  for (Trajectory& rollout : none) rollout.trained = false;
  const auto before = values_of(*model);
  EXPECT_EQ(trainer.train_step(none).count("optim/grad_norm"), 0u);
  EXPECT_EQ(largest_difference(before, values_of(*model)), 0);
  EXPECT_EQ(trainer.optimizer().num_steps(), 0);

  // A group that is marked as untrained has no effect.
  std::vector<Trajectory> marked = batch_of(2);
  for (size_t s = 4; s < 8; ++s) marked[s].trained = false;
  Trainer other_trainer(*other, nullptr, settings_with("path"), 10, clock);
  trainer.train_step(marked);
  other_trainer.train_step(batch_of(1));
  EXPECT_EQ(largest_difference(values_of(*model), values_of(*other)), 0);
}

// A token that the vocabulary does not have ends a step in the embedding. With two mini-batches, the other
// one may have changed the weights by then.
TEST(Trainer, UntilItsFirstUpdateAStepThatFailsLeavesTheStateOfTheStepBefore) {
  const SteadyClock clock;
  std::map<int64_t, int64_t> num_changed;
  for (const int64_t mini_batches : {1, 2})
    for (const char* bad_group : {"g0", "g1"}) {
      ActorSettings settings = settings_with("path", mini_batches);
      settings.loss.use_decoupled_loss = settings.loss.recompute_logprob =
          false;  // no pass before the updates
      const auto model = small_model(at::kDouble);
      Trainer trainer(*model, nullptr, settings, 10, clock);
      EXPECT_EQ(trainer.why_not_at(0), "");
      trainer.train_step(batch_of(2));
      EXPECT_EQ(trainer.why_not_at(1), "");
      EXPECT_EQ(trainer.why_not_at(0), "the weights are already those of step 1");
      const std::vector<at::Tensor> before = values_of(*model);
      std::vector<Trajectory> bad = batch_of(2);
      for (Trajectory& row : bad)
        if (row.group == bad_group) row.input_ids.back() = 1'000'000;
      EXPECT_ANY_THROW(trainer.train_step(bad));
      const bool has_changed = largest_difference(before, values_of(*model)) > 0;
      num_changed[mini_batches] += has_changed;
      EXPECT_EQ(trainer.why_not_at(1), has_changed ? "the weights had begun to change in step 2" : "");
      trainer.set_version(1);
      trainer.train_step(batch_of(2));
      EXPECT_EQ(trainer.why_not_at(2), "");
    }
  EXPECT_EQ(num_changed, (std::map<int64_t, int64_t>{{1, 0}, {2, 1}}));
}

TEST(Trainer, MiniBatchesClipAgainstThePolicyOfTheStart) {
  const SteadyClock clock;
  const auto model = small_model(at::kDouble);
  ActorSettings settings = settings_with("path", 3);
  settings.optimizer.lr = 0.1;  // mini-batches 2 and 3 must leave the clip range
  settings.loss.use_decoupled_loss = false;
  Trainer trainer(*model, nullptr, settings, 10, clock);
  const MetricValues metrics = trainer.train_step(batch_of(3));
  EXPECT_EQ(trainer.optimizer().num_steps(), 3);
  EXPECT_GT(metrics.at("policy/approx_kl"), 1e-4);  // it would be 0 if pi_old were always the current policy
  const auto single = small_model(at::kDouble);
  Trainer one(*single, nullptr, settings_with("path"), 10, clock);
  EXPECT_NEAR(one.train_step(batch_of(3)).at("policy/approx_kl"), 0, 1e-12);
}

TEST(Trainer, TheReferenceOfTheKlTermIsTheOneGiven) {
  const SteadyClock clock;
  ActorSettings settings = settings_with("path");
  settings.loss.kl_loss_coef = 0.1;
  const auto model = small_model(at::kDouble), same = small_model(at::kDouble),
             other = small_model(at::kDouble, 1);
  const auto copy = small_model(at::kDouble);
  Trainer near(*model, same.get(), settings, 10, clock), far(*copy, other.get(), settings, 10, clock);
  EXPECT_NEAR(near.train_step(batch_of(2)).at("loss/kl"), 0, 1e-12);
  EXPECT_GT(far.train_step(batch_of(2)).at("loss/kl"), 1e-2);
}

TEST(Trainer, UtilisationCountsWhatTheTreeNeedsAtTheCalibratedRate) {
  const SteadyClock clock;
  const auto model = small_model(at::kFloat);
  Trainer trainer(*model, nullptr, settings_with("dense"), 10, clock);
  EXPECT_EQ(trainer.train_step(batch_of(1)).count("perf/mfu"), 0u) << "without costs there is no rate";
  const WorkModel work{.flops_per_token = 7e4, .flops_per_head_row = 3e4, .flops_per_pair = 500};
  trainer.use_costs({.passes = nullptr, .work = work, .matrix_product_rate = 5e9});
  const MetricValues metrics = trainer.train_step(batch_of(1));
  // Five common tokens, then three tokens of each of four samples. Each of these twelve tokens has a head
  // row. The three tokens attend to 6, 7 and 8 tokens.
  const double forward = 17 * work.flops_per_token + 12 * work.flops_per_head_row +
                         (1 + 2 + 3 + 4 + 5 + 4 * (6 + 7 + 8)) * work.flops_per_pair;
  EXPECT_NEAR(metrics.at("perf/mfu") * metrics.at("time/train") * 5e9 / (3 * forward), 1, 1e-9);
}

// The clip compares with the behavior policy, for any number of updates per batch.
TEST(Trainer, WithoutRecomputedLogProbsPiOldIsTheBehaviourPolicy) {
  const SteadyClock clock;
  ActorSettings settings = settings_with("path");
  settings.loss.use_decoupled_loss = settings.loss.recompute_logprob = false;
  const auto model = small_model(at::kDouble), other = small_model(at::kDouble);
  Trainer trainer(*model, nullptr, settings, 10, clock);
  EXPECT_GT(trainer.train_step(batch_of(2)).at("policy/approx_kl"), 1e-3);
  settings.loss.recompute_logprob = true;
  Trainer recomputing(*other, nullptr, settings, 10, clock);
  EXPECT_NEAR(recomputing.train_step(batch_of(2)).at("policy/approx_kl"), 0, 1e-12);
}

// Sequences with one to three trained tokens.
std::vector<Trajectory> batch_of_lengths(int64_t groups) {
  std::vector<Trajectory> batch = batch_of(groups);
  for (size_t s = 0; s < batch.size(); ++s)
    for (size_t i = 0; i < s % 3; ++i) batch[s].loss_mask[5 + i] = 0;
  return batch;
}

TEST(Trainer, ALossIsAggregatedAsItWasPublished) {
  const SteadyClock clock;
  const auto update = [&](const std::string& loss, const std::string& how) {
    const auto model = small_model(at::kDouble);
    ActorSettings settings = settings_with("path", /*mini_batches=*/2);
    settings.loss.loss = loss;
    settings.aggregation.loss_aggregation = how;
    Trainer(*model, nullptr, settings, 10, clock).train_step(batch_of_lengths(4));
    return values_of(*model);
  };
  for (const auto& [loss, own, other] : {std::tuple("gspo", "sequence_mean", "token_mean"),
                                         std::tuple("ppo", "token_mean", "sequence_mean")}) {
    EXPECT_EQ(largest_difference(update(loss, "auto"), update(loss, own)), 0) << loss;
    EXPECT_GT(largest_difference(update(loss, "auto"), update(loss, other)), 1e-4) << loss;
  }
}

// If the verifier fails for half of the samples, the optimizer step equals that of the batch without these
// samples, to the last bit.
TEST(Trainer, SamplesWithoutARewardLeaveNoTraceInTheGradient) {
  const SteadyClock clock;
  for (const char* mode : {"path", "dense"}) {
    const ActorSettings settings = settings_with(mode);
    const auto trained = [&](bool drops) {
      std::vector<Trajectory> batch;
      for (Trajectory& row : batch_of(4)) {
        const size_t index = batch.size();
        row.reward = row.advantage[0];
        row.advantage.clear();
        row.valid = index % 4 < 2;
        if (!row.valid) row.reward.reset();
        batch.push_back(std::move(row));
      }
      if (drops) std::erase_if(batch, [](const Trajectory& row) { return !row.valid; });
      set_advantages(batch, settings, {});
      auto model = small_model(at::kDouble);
      Trainer(*model, nullptr, settings, 10, clock).train_step(batch);
      return values_of(*model);
    };
    const auto with_failures = trained(false), without = trained(true);
    EXPECT_EQ(largest_difference(with_failures, without), 0) << mode;
    EXPECT_GT(largest_difference(without, values_of(*small_model(at::kDouble))), 1e-4);
  }
}

// The effective sample size merged over all passes of a path plan, compared with a count over the flat batch.
TEST(Trainer, EffectiveSampleSizeByAgeIsThatOfTheWholeStep) {
  const SteadyClock clock;
  std::vector<Trajectory> batch = batch_of(3);
  for (size_t s = 0; s < batch.size(); ++s)
    for (const uint8_t trains : batch[s].loss_mask)
      batch[s].versions.push_back(trains == 0 ? -1 : s % 2 == 0 ? 7 : 3);
  const auto model = small_model(at::kDouble);
  Trainer trainer(*model, nullptr, settings_with("path"), 10, clock);
  trainer.set_version(7);
  const MetricValues metrics = trainer.train_step(batch);
  const auto reference = small_model(at::kDouble);
  const TrainBatch flat = make_batch(batch, {}, at::kDouble);
  const at::Tensor log_probs_R =
      Executor(*reference).execute_forward(make_plan("dense", plan_request(flat, 4096)), flat).log_probs_R;
  for (const auto& [version, name] : std::map<int32_t, std::string>{{7, "age_0"}, {3, "age_3_to_4"}}) {
    const at::Tensor w_R = log_probs_R.sub(flat.fields.behaviour_log_probs_R)
                               .index({flat.fields.versions_R.eq(version)})
                               .to(at::kDouble)
                               .exp();
    const auto n = static_cast<double>(w_R.numel());
    const double expected = w_R.sum().square().div(w_R.square().sum()).item<double>() / n;
    EXPECT_LT(expected, 0.95);
    EXPECT_NEAR(metrics.at(name + "/effective_sample_size"), expected, 1e-9) << name;
    EXPECT_EQ(metrics.count(name + "/importance_weight_square_mean"), 0u);
  }
  EXPECT_EQ(metrics.count("age_1/effective_sample_size"), 0u);
}

TEST(Trainer, EffectiveSampleSizeIsThatOfTheFactorsOfTheWholeStep) {
  const SteadyClock clock;
  const auto metrics = [&](const std::string& correction) {
    const auto model = small_model(at::kDouble);
    ActorSettings settings = settings_with("path");
    settings.loss.correction = correction;
    settings.loss.correction_veto = 0;
    return Trainer(*model, nullptr, settings, 10, clock).train_step(batch_of(3));
  };
  const MetricValues plain = metrics("cap"), accepted = metrics("rejection");
  EXPECT_EQ(plain.count("mismatch/factor_square_mean"), 0u);
  EXPECT_DOUBLE_EQ(plain.at("mismatch/factor_mean"), plain.at("mismatch/importance_weight_mean"));
  EXPECT_LT(plain.at("mismatch/effective_sample_size"), 0.9);
  EXPECT_GT(plain.at("mismatch/effective_sample_size"), 1.0 / 36) << "of 36 tokens";
  // If factors are 0 or 1, the effective sample size is the fraction of ones.
  EXPECT_NEAR(accepted.at("mismatch/effective_sample_size"), 1 - accepted.at("mismatch/masked_fraction"),
              1e-12);
}

TEST(Trainer, MicroBatchesAreCountedWithoutATreeOnly) {
  ActorSettings settings = settings_with("dense");
  settings.mb_spec.n_mbs = 4;
  settings.check();
  settings.tree.tree_training_mode = "auto";
  EXPECT_THROW(settings.check(), UserError);
  settings.mb_spec = {.allocation = "fixed"};
  EXPECT_THROW(settings.check(), UserError);
}

// Samples have versions 0, 1, 2, 3, 0, … in turn.
std::vector<Trajectory> batch_with_versions(int64_t groups) {
  std::vector<Trajectory> batch = batch_of(groups);
  for (size_t s = 0; s < batch.size(); ++s) {
    batch[s].versions.assign(8, -1);
    for (size_t i = 5; i < 8; ++i) batch[s].versions[i] = static_cast<int32_t>(s % 4);
  }
  return batch;
}

TEST(Trainer, LoglinearInterpolatesUpToTheVersionItWasTold) {
  const SteadyClock clock;
  ActorSettings settings = settings_with("path");
  settings.loss.prox_logp_method = "loglinear";
  const auto difference = [&](std::optional<int64_t> version) {
    const auto model = small_model(at::kDouble);
    Trainer trainer(*model, nullptr, settings, 10, clock);
    if (version) trainer.set_version(*version);
    return trainer.train_step(batch_with_versions(2)).at("mismatch/logprob_abs_diff");
  };
  const double near = difference(4), far = difference(100);
  EXPECT_EQ(difference(1), 0) << "no token is older than a version: pi_old is mu";
  EXPECT_GT(near, 0.1);
  EXPECT_GT(far, 1.5 * near) << "the older the token, the nearer to pi";
  EXPECT_EQ(difference({}), difference(3)) << "nobody said it: the batch's newest";
  const auto model = small_model(at::kDouble);
  EXPECT_THROW(Trainer(*model, nullptr, settings, 10, clock).train_step(batch_of(2)), UserError);
}

TEST(Trainer, KeptTokenValuesAreThoseOfThePolicyBeforeTheStep) {
  const SteadyClock clock;
  const auto model = small_model(at::kDouble);
  const FlatReference before(*model);
  Trainer trainer(*model, nullptr, settings_with("path"), 10, clock);
  std::vector<Trajectory> batch = batch_of(3);
  batch[1].trained = false;
  trainer.train_step(batch);
  trainer.set_token_values(batch);
  EXPECT_TRUE(batch[0].columns.empty()) << "nobody asked for them";
  const auto again = small_model(at::kDouble);
  Trainer keeping(*again, nullptr, settings_with("path"), 10, clock);
  keeping.keep_token_values();
  keeping.train_step(batch);
  EXPECT_EQ(largest_difference(values_of(*model), values_of(*again)), 0);
  keeping.set_token_values(batch);
  EXPECT_TRUE(batch[1].columns.empty());
  for (const Trajectory& row : batch) {
    if (!row.trained) continue;
    const auto expected = before.sequence({row.input_ids.begin(), row.input_ids.end()}, 1.0);
    const std::vector<double>& entropy = row.columns.at(kEntropyColumn);
    ASSERT_EQ(entropy.size(), 3u);
    for (int64_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(entropy[static_cast<size_t>(i)], expected.entropies[4 + i].item<double>(), 6e-4);
      const double mismatch =
          expected.log_probs[4 + i].item<double>() - double{row.logprobs[static_cast<size_t>(5 + i)]};
      EXPECT_NEAR(row.columns.at(kMismatchColumn)[static_cast<size_t>(i)], mismatch, 6e-4);
    }
  }
}

TEST(Trainer, TheTrainingPassIsPiOldOfOneUpdateOnly) {
  const SteadyClock clock;
  ActorSettings settings = settings_with("path");
  const auto model = small_model(at::kDouble), other = small_model(at::kDouble);
  Trainer(*model, nullptr, settings, 10, clock).train_step(batch_of(3));
  settings.loss.prox_logp_method = "reuse_train_logp";
  settings.check();
  Trainer(*other, nullptr, settings, 10, clock).train_step(batch_of(3));
  EXPECT_EQ(largest_difference(values_of(*model), values_of(*other)), 0);
  settings.ppo_n_minibatches = 3;
  EXPECT_THROW(settings.check(), UserError);
  EXPECT_THROW(Trainer(*model, nullptr, settings, 10, clock).train_step(batch_of(3)), UserError);
}

}  // namespace
}  // namespace bough

#include "train/critic.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "base/error.h"
#include "base/file.h"
#include "models/checkpoint.h"
#include "models/lora.h"
#include "plan/simulator.h"
#include "plan/test_costs.h"
#include "train/reference_comparison.h"
#include "train/sequence_steps.h"
#include "train/small_model.h"
#include "train/trainer.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCriticStrategies[] = {"dense", "path", "blocks", "packed"};

ActorSettings actor_with(const std::string& strategy, int64_t max_tokens = 4096) {
  ActorSettings settings;
  settings.tree.tree_training_mode = strategy;
  settings.mb_spec.max_tokens_per_mb = max_tokens;
  settings.advantages.adv_estimator = "gae";
  settings.optimizer.lr = 1e-2;
  settings.optimizer.warmup_steps_proportion = 0;
  return settings;
}

CriticSettings critic_settings(bool share_backbone = false) {
  CriticSettings settings;
  settings.share_backbone = share_backbone;
  settings.optimizer.lr = 1e-2;
  settings.optimizer.warmup_steps_proportion = 0;
  return settings;
}

// Fills the value_head with random numbers, since its initial weights are 0.
void randomise(Critic& critic) {
  auto generator = at::detail::createCPUGenerator(7);
  for (Parameter* parameter : critic.head().parameters())
    parameter->value.copy_(
        at::randn(parameter->value.sizes(), generator, at::TensorOptions().dtype(at::kDouble)) * 0.5);
}

void zero_gradients(Critic& critic) {
  critic.backbone().allocate_gradients();
  critic.backbone().zero_gradients();
  for (Parameter* parameter : critic.head().parameters()) parameter->main_grad.zero_();
}

// Sets old values near the current values, so that some are clipped, and random returns.
void add_targets(TrainBatch& batch, const at::Tensor& values_R, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  const auto noise = [&] {
    return at::randn({batch.num_rows()}, generator, at::TensorOptions().dtype(at::kDouble));
  };
  batch.old_values_R = values_R.to(at::kDouble) + noise();
  batch.returns_R = values_R.to(at::kDouble) + 2 * noise();
}

std::map<std::string, at::Tensor> gradients_of(Critic& critic) {
  std::map<std::string, at::Tensor> gradients;
  for (const auto& [name, gradient] : named_gradients(critic.backbone())) gradients[name] = gradient.clone();
  for (Parameter* parameter : critic.head().parameters())
    gradients[parameter->parts[0].name] = parameter->main_grad.clone();
  return gradients;
}

TEST(Critic, ValuesAndGradientsAreThoseOfTheFlatBatchInEveryPlan) {
  for (uint64_t seed = 0; seed < 16; ++seed) {
    const auto r = random_batch(seed, seed == 0 ? 200 : 100);
    const auto model = random_model(seed, at::kDouble);
    std::optional<ValueExecution> flat;
    std::map<std::string, at::Tensor> expected;
    for (const char* strategy : kCriticStrategies)
      for (const int64_t limit : {int64_t{4096}, 7 + static_cast<int64_t>(seed)}) {
        if (strategy == std::string("packed") && limit < 4096) continue;  // packed plans do not cut sequences
        Critic critic(*model, critic_settings(), actor_with(strategy, limit), 10);
        randomise(critic);
        zero_gradients(critic);
        const at::Tensor values_R = critic.values(r->batch);
        if (!flat) add_targets(r->batch, values_R, seed);
        const ValueExecution execution = critic.add_gradient(critic.plan(r->batch), r->batch);
        const std::string what = str(strategy, " seed ", seed, " B ", limit);
        EXPECT_TRUE(at::allclose(execution.values_R, values_R, 0, 1e-10)) << what;
        if (!flat) {
          flat = execution;
          expected = gradients_of(critic);
          continue;
        }
        EXPECT_NEAR(execution.loss, flat->loss, 1e-10 * std::max(1.0, flat->loss)) << what;
        ASSERT_TRUE(at::allclose(execution.values_R, flat->values_R, 0, 1e-10)) << what;
        double largest = 0;
        for (const auto& [name, gradient] : expected)
          largest = std::max(largest, gradient.norm().item<double>());
        for (const auto& [name, gradient] : gradients_of(critic))
          ASSERT_LE((gradient - expected.at(name)).norm().item<double>(), 1e-10 * std::max(1e-5, largest))
              << what << " " << name;
      }
  }
}

TEST(Critic, GradientIsTheCentralDifference) {
  const auto r = random_batch(3, 60);
  const auto model = random_model(3, at::kDouble);
  Critic critic(*model, critic_settings(), actor_with("path", 9), 10);
  randomise(critic);
  add_targets(r->batch, critic.values(r->batch), 3);
  zero_gradients(critic);
  const Plan plan = critic.plan(r->batch);
  const auto loss = [&] { return critic.add_gradient(plan, r->batch).loss; };
  loss();
  std::vector<Parameter*> parameters = model->parameters();
  for (Parameter* parameter : critic.head().parameters()) parameters.push_back(parameter);
  std::vector<at::Tensor> gradients;
  for (Parameter* parameter : parameters) gradients.push_back(parameter->main_grad.clone());
  std::mt19937_64 random(1);
  for (size_t p = 0; p < parameters.size(); ++p) {
    const auto flat = parameters[p]->value.view({-1});
    const int64_t i = static_cast<int64_t>(random() % static_cast<uint64_t>(flat.numel()));
    const auto shifted = [&](double h) {
      flat[i] += h;
      const double value = loss();
      flat[i] -= h;
      return value;
    };
    constexpr double kStep = 1e-6;
    EXPECT_NEAR((shifted(kStep) - shifted(-kStep)) / (2 * kStep), gradients[p].view({-1})[i].item<double>(),
                1e-6)
        << parameters[p]->parts[0].name;
  }
}

// Counts how often the head reads each loss row's token.
class CountingHead final : public BlockHead {
 public:
  at::Tensor run(const BlockRows& rows, const RowIndices&, const at::Tensor&) override {
    num_rows += rows.num_rows();
    num_loss_rows += std::ssize(rows.loss_rows);
    return {};
  }
  int64_t num_rows = 0, num_loss_rows = 0;
};

TEST(Critic, AValueOfASharedTokenIsComputedOnce) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto r = random_batch(seed, 200);
    const auto model = random_model(seed, at::kDouble);
    const PrefixTree tree = build_prefix_tree(r->batch.sequences);
    std::vector<bool> trained(static_cast<size_t>(tree.num_tokens()));
    for (size_t s = 0; s < r->batch.sequences.size(); ++s) {
      const auto path = tree.path(static_cast<int64_t>(s));
      for (const int32_t position : r->batch.trained_positions[s]) trained[path[position]] = true;
    }
    for (const char* strategy : {"path", "blocks"}) {
      CountingHead head;
      Executor(*model).execute_head(make_plan(strategy, plan_request(r->batch, 30)), r->batch, head, false);
      EXPECT_EQ(head.num_rows, std::count(trained.begin(), trained.end(), true)) << strategy << seed;
      EXPECT_EQ(head.num_loss_rows, r->batch.num_rows());
    }
  }
}

TEST(Critic, GradientsOfPolicyAndCriticAddInASharedExecution) {
  const auto r = random_batch(5, 150);
  const auto model = random_model(5, at::kDouble);
  const auto loss = full_loss();
  CriticSettings settings = critic_settings(/*share_backbone=*/true);
  settings.loss_coef = 0.3;
  Critic shared(*model, settings, actor_with("path", 20), 10);
  settings.share_backbone = false;
  Critic alone(*model, settings, actor_with("path", 20), 10);
  randomise(shared);
  randomise(alone);
  add_targets(r->batch, alone.values(r->batch), 5);
  const Plan plan = alone.plan(r->batch);
  Executor executor(*model);
  zero_gradients(alone);
  executor.execute(plan, r->batch, *loss);
  const ValueExecution by_itself = alone.add_gradient(plan, r->batch);
  const auto expected = gradients_of(alone);

  zero_gradients(shared);
  ValueBlockHead beside = shared.beside_policy(r->batch);
  executor.execute(plan, r->batch, *loss, &beside);
  EXPECT_NEAR(beside.finish().loss, by_itself.loss, 1e-12 * by_itself.loss);
  for (const auto& [name, gradient] : gradients_of(shared))
    EXPECT_TRUE(at::allclose(gradient, expected.at(name), 1e-10, 1e-12)) << name;

  // In the critic's warm-up, add_gradient() trains the head alone: a forward-only plan execution gives the
  // head's gradient, and the actor's backbone gets none.
  zero_gradients(shared);
  shared.add_gradient(plan, r->batch);
  for (const auto& [name, gradient] : gradients_of(shared)) {
    const bool is_head = name.starts_with("score.");
    EXPECT_TRUE(at::allclose(gradient, is_head ? expected.at(name) : at::zeros_like(gradient), 1e-10, 1e-12))
        << name;
  }
}

// The value_head's gradient passes through the frozen backbone to the policy's adapters.
TEST(Critic, AdaptersGetTheGradientsOfPolicyAndCriticInASharedExecution) {
  const auto r = random_batch(6, 120);
  const auto model = random_model(6, at::kDouble);
  add_adapter(*model, {.rank = 3}, 5);
  at::manual_seed(3);
  for (Parameter* parameter : model->trained_parameters())
    parameter->value.copy_(at::randn_like(parameter->value) * 0.1);
  const auto loss = full_loss();
  CriticSettings settings = critic_settings(/*share_backbone=*/true);
  settings.loss_coef = 0.3;
  Critic critic(*model, settings, actor_with("path", 20), 10);
  randomise(critic);
  add_targets(r->batch, critic.values(r->batch), 6);
  const Plan plan = critic.plan(r->batch);
  Executor executor(*model);
  const auto total = [&] {
    ValueBlockHead beside = critic.beside_policy(r->batch);
    const double policy = executor.execute(plan, r->batch, *loss, &beside).loss;
    return policy + 0.3 * beside.finish().loss;
  };
  zero_gradients(critic);
  total();
  std::vector<Parameter*> trained = model->trained_parameters();
  for (Parameter* parameter : critic.head().parameters()) trained.push_back(parameter);
  double slope = 0;
  std::vector<at::Tensor> direction;
  for (Parameter* parameter : trained) {
    direction.push_back(at::randn_like(parameter->value));
    slope += (direction.back() * parameter->main_grad).sum().item<double>();
  }
  EXPECT_GT(std::abs(slope), 1e-3);
  const auto at_distance = [&](double distance) {
    for (size_t i = 0; i < trained.size(); ++i) trained[i]->value.add_(direction[i], distance);
    const double value = total();
    for (size_t i = 0; i < trained.size(); ++i) trained[i]->value.sub_(direction[i], distance);
    return value;
  };
  constexpr double kDistance = 1e-6;
  EXPECT_NEAR((at_distance(kDistance) - at_distance(-kDistance)) / (2 * kDistance), slope,
              1e-5 * std::max(1.0, std::abs(slope)));
  for (const Parameter* parameter : model->parameters()) EXPECT_FALSE(parameter->main_grad.defined());
}

// Groups of four samples: a prompt of five tokens, then two or three tokens of each sample. One sample is
// truncated, one response is empty.
std::vector<Trajectory> scored_batch(int64_t groups) {
  std::vector<Trajectory> batch;
  for (int32_t g = 0; g < groups; ++g)
    for (int32_t i = 0; i < 4; ++i) {
      Trajectory row;
      row.group = str("g", g);
      row.input_ids = {1, 2, 3, 4, 5 + g, 10 + i, 20 + (i + g) % 3, 30};
      row.loss_mask = {0, 0, 0, 0, 0, 1, 1, static_cast<uint8_t>(i % 2)};
      if (g == 0 && i == 3) row.loss_mask.assign(8, 0);
      row.logprobs = {0, 0, 0, 0, 0, -3.5f, -3.4f, -3.3f};
      row.reward = (i + g) % 3 == 0 ? 1.0 : 0.0;
      row.finish_reason = i == 1 ? "length" : "stop";
      batch.push_back(std::move(row));
    }
  return batch;
}

// One training step as a run makes it.
MetricValues step(Trainer& trainer, std::vector<Trajectory> batch, const ActorSettings& settings) {
  set_advantages(batch, settings, {}, {}, [&](std::vector<Trajectory>& rows) { trainer.set_values(rows); });
  return trainer.train_step(batch);
}

std::vector<at::Tensor> values_of(const std::vector<Parameter*>& parameters) {
  std::vector<at::Tensor> values;
  for (const Parameter* parameter : parameters) values.push_back(parameter->value.clone());
  return values;
}

bool all_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!a[i].equal(b[i])) return false;
  return true;
}

struct TinyRun {
  explicit TinyRun(bool share_backbone, ActorSettings actor = actor_with("path"), int64_t warmup_steps = 0,
                   at::ScalarType type = at::kDouble)
      : settings(std::move(actor)),
        model(small_model(type)),
        own(share_backbone ? nullptr : small_model(type)) {
    CriticSettings of_critic = critic_settings(share_backbone);
    of_critic.warmup_steps = warmup_steps;
    critic = std::make_unique<Critic>(own ? *own : *model, of_critic, settings, 10);
    trainer = std::make_unique<Trainer>(*model, nullptr, settings, 10, clock,
                                        TrainerOptions{.critic = critic.get()});
  }
  MetricValues step(int64_t groups = 3) { return bough::step(*trainer, scored_batch(groups), settings); }
  std::vector<at::Tensor> weights() {
    std::vector<at::Tensor> all = values_of(model->parameters());
    for (const at::Tensor& value : values_of(critic->head().parameters())) all.push_back(value);
    if (own)
      for (const at::Tensor& value : values_of(own->parameters())) all.push_back(value);
    return all;
  }

  SteadyClock clock;
  ActorSettings settings;
  std::unique_ptr<Model> model, own;
  std::unique_ptr<Critic> critic;
  std::unique_ptr<Trainer> trainer;
};

TEST(CriticOfATrainer, StartsAtZeroAndLearnsTheReturns) {
  for (const bool share_backbone : {false, true}) {
    ActorSettings actor = actor_with("path");
    actor.optimizer.lr = 2e-3;
    TinyRun run(share_backbone, actor);
    const MetricValues first = run.step();
    EXPECT_EQ(first.at("critic/value_mean"), 0);
    EXPECT_NEAR(first.at("critic/return_mean"), 9.0 / 24, 0.2);
    EXPECT_GT(first.at("critic/grad_norm"), 0);
    MetricValues last;
    for (int i = 0; i < 30; ++i) last = run.step();
    // A shared backbone also receives the policy's gradient.
    EXPECT_GT(last.at("critic/explained_variance"), share_backbone ? 0.1 : 0.3);
  }
}

TEST(CriticOfATrainer, WarmUpLeavesTheActorAlone) {
  for (const bool share_backbone : {false, true}) {
    TinyRun run(share_backbone, actor_with("path"), /*warmup_steps=*/2);
    const auto before = values_of(run.model->parameters()), head = values_of(run.critic->head().parameters());
    for (int i = 0; i < 2; ++i) {
      const MetricValues metrics = run.step();
      EXPECT_EQ(metrics.count("optim/grad_norm"), 0u);
      EXPECT_GT(metrics.at("tree/compression"), 1);
    }
    EXPECT_TRUE(all_equal(before, values_of(run.model->parameters()))) << share_backbone;
    EXPECT_FALSE(all_equal(head, values_of(run.critic->head().parameters())));
    EXPECT_EQ(run.trainer->optimizer().num_steps(), 0);
    EXPECT_EQ(run.critic->optimizer().num_steps(), 2);
    run.step();
    EXPECT_FALSE(all_equal(before, values_of(run.model->parameters())));
    // The warm-up counts the run's training steps (set_version), not the calls of this trainer. A resumed run
    // therefore continues the warm-up.
    TinyRun later(share_backbone, actor_with("path"), /*warmup_steps=*/2);
    later.trainer->set_version(2);
    EXPECT_EQ(later.step().count("optim/grad_norm"), 1u);
  }
}

TEST(CriticOfATrainer, SharingChangesTheWorkAndNotTheUpdate) {
  for (const bool share_backbone : {false, true}) {
    ActorSettings path = actor_with("path"), dense = actor_with("dense");
    path.ppo_n_minibatches = dense.ppo_n_minibatches = 2;
    path.ppo_epochs = dense.ppo_epochs = 2;
    TinyRun a(share_backbone, path), b(share_backbone, dense);
    for (int i = 0; i < 3; ++i) {
      const MetricValues x = a.step(), y = b.step();
      for (const char* name : {"critic/loss", "critic/value_mean", "loss/policy", "critic/grad_norm"})
        EXPECT_NEAR(x.at(name), y.at(name), 1e-8) << name;
    }
    EXPECT_EQ(a.critic->optimizer().num_steps(), 3 * 4);
  }
}

TEST(CriticOfATrainer, AnEmptyBatchChangesNothing) {
  TinyRun run(false);
  const auto before = run.weights();
  std::vector<Trajectory> batch = scored_batch(1);
  for (Trajectory& row : batch) row.loss_mask.assign(8, 0);
  step(*run.trainer, batch, run.settings);
  EXPECT_TRUE(all_equal(before, run.weights()));
  EXPECT_EQ(run.critic->optimizer().num_steps(), 0);
  // In groups of one sample the critic is the only baseline.
  batch = {scored_batch(1)[0]};
  EXPECT_GT(step(*run.trainer, batch, run.settings).at("critic/loss"), 0);
}

TEST(CriticOfATrainer, GoesOnFromASnapshotBitForBit) {
  const fs::path folder = fs::path(testing::TempDir()) / "critic_snapshot";
  for (const at::ScalarType type : {at::kBFloat16, at::kFloat})
    for (const bool share_backbone : {false, true}) {
      fs::remove_all(folder);
      TinyRun run(share_backbone, actor_with("path"), 1, type),
          other(share_backbone, actor_with("path"), 1, type);
      run.step();
      run.step();
      const CriticSnapshot copy = run.critic->snapshot(/*copies=*/true);
      OptimizerSnapshot actor = run.trainer->optimizer().snapshot(/*copies=*/true);
      save_model(folder / "actor", *run.model);
      run.step();
      copy.save(folder / "critic");  // of the earlier state; training went on
      actor.save(folder);
      EXPECT_EQ(fs::exists(folder / "critic/model"), !share_backbone);
      load_weights(folder / "actor", *other.model);
      other.trainer->optimizer().load(folder);
      other.critic->load(folder / "critic");
      other.trainer->set_version(2);
      other.step();
      EXPECT_TRUE(all_equal(run.weights(), other.weights())) << type << share_backbone;
      TinyRun wider(share_backbone);
      EXPECT_THROW(wider.critic->load(folder / "nowhere"), std::exception);
    }
  fs::remove_all(folder);
}

TEST(Critic, MemoryForPassesExcludesTheCritics) {
  const auto model = small_model(at::kFloat);
  int64_t elements = 0;
  for (const Parameter* parameter : model->parameters()) elements += parameter->value.numel();
  ActorSettings settings = actor_with("path");
  const Critic own(*model, critic_settings(), settings, 10),
      shared(*model, critic_settings(true), settings, 10);
  EXPECT_EQ(own.resident_bytes(), 16 * (elements + 17));
  EXPECT_EQ(shared.resident_bytes(), 16 * 17);
  settings.mb_spec.memory.count = own.resident_bytes() + 1000;
  EXPECT_EQ(beside_critic(settings, &own).mb_spec.memory.count, 1000);
  settings.mb_spec.memory.count = own.resident_bytes();
  EXPECT_THROW(beside_critic(settings, &own), UserError);
  EXPECT_EQ(beside_critic(settings, nullptr).mb_spec.memory.count, own.resident_bytes());
}

TEST(Critic, PlansOnAGpuKeepToTheFreeMemory) {
  int calls = 0;
  int64_t free_bytes = int64_t{1} << 40;
  const auto free = [&] { return ++calls, free_bytes; };
  const PassMemory on_cpu(at::kCPU, nullptr, free), on_gpu(at::kCUDA, nullptr, free);
  EXPECT_EQ(on_cpu.bytes(), std::nullopt);
  EXPECT_EQ(calls, 0);
  EXPECT_EQ(on_gpu.bytes(), static_cast<int64_t>(0.9 * 0x1p40));
  free_bytes = 1;
  EXPECT_EQ(on_gpu.bytes(), static_cast<int64_t>(0.9 * 0x1p40)) << "later passes hold memory themselves";

  const auto r = random_batch(1, 100);
  const auto model = random_model(1, at::kFloat);
  const TestCosts costs;
  Critic critic(*model, critic_settings(), actor_with("auto"), 10);
  critic.use_costs(&costs);
  const int64_t unbounded = simulate(critic.plan(r->batch), &costs).peak_bytes;
  free_bytes = unbounded;  // of which passes may use 0.9
  critic.use_memory(PassMemory(at::kCUDA, nullptr, free));
  EXPECT_LE(simulate(critic.plan(r->batch), &costs).peak_bytes, 0.9 * static_cast<double>(unbounded));
  free_bytes = 1000;
  critic.use_memory(PassMemory(at::kCUDA, nullptr, free));
  EXPECT_THROW(critic.plan(r->batch), UserError);
}

TEST(Critic, TheBackboneIsSeparateIfMemoryHoldsIt) {
  const auto model = small_model(at::kFloat);
  int64_t elements = 0;
  for (const Parameter* parameter : model->parameters()) elements += parameter->value.numel();
  ActorSettings settings = actor_with("path");
  settings.mb_spec.memory.count = 2 * 16 * elements;
  EXPECT_TRUE(memory_holds_critic(settings, *model, 0));
  settings.mb_spec.memory.count -= 1;
  EXPECT_FALSE(memory_holds_critic(settings, *model, int64_t{1} << 60));
  settings.mb_spec.memory = {};
  ASSERT_TRUE(settings.mb_spec.memory.is_auto());
  const auto needed = static_cast<int64_t>(28 * elements / kCriticShare);  // per element: critic 16, actor 12
  EXPECT_TRUE(memory_holds_critic(settings, *model, needed + 2));
  EXPECT_FALSE(memory_holds_critic(settings, *model, needed - 2));
  const auto narrow = small_model(at::kBFloat16);
  EXPECT_FALSE(memory_holds_critic(settings, *narrow, needed + 2)) << "masters: 18 and 16 bytes";
}

TEST(Trainer, EpochsGoOverTheSameMiniBatchesAgainstThePolicyOfTheStart) {
  const SteadyClock clock;
  ActorSettings settings = actor_with("path");
  settings.advantages.adv_estimator = "dr_grpo";
  settings.ppo_n_minibatches = 2;
  settings.optimizer.lr = 0.1;
  settings.loss.use_decoupled_loss = false;
  std::vector<Trajectory> batch = scored_batch(3);
  set_advantages(batch, settings, {});
  const auto twice = small_model(at::kDouble), once = small_model(at::kDouble);
  const auto train = [&](Model& model, int64_t epochs) {
    settings.ppo_epochs = epochs;
    Trainer trainer(model, nullptr, settings, 10, clock);
    const MetricValues metrics = trainer.train_step(batch);
    EXPECT_EQ(trainer.optimizer().num_steps(), 2 * epochs);
    return metrics.at("policy/approx_kl");
  };
  EXPECT_GT(train(*twice, 3), 2 * train(*once, 1)) << "the distance is to the policy of the start";
  settings.ppo_n_minibatches = 1;
  settings.ppo_epochs = 2;
  settings.loss.prox_logp_method = "reuse_train_logp";
  settings.loss.use_decoupled_loss = true;
  EXPECT_THROW(settings.check(), UserError);
}

// ---- Rewards per turn, and advantages of whole trajectories.

Trajectory turns_of_areal() {
  Trajectory row;
  row.group = "g";
  row.input_ids = {1, 2, 3, 4, 5, 6};
  row.loss_mask = {0, 1, 1, 0, 1, 1};
  row.logprobs.assign(6, -1);
  row.turns = {-1, 0, 0, -1, 2, 2};
  row.turn_rewards = {3, 0, 4};
  row.reward = 7;
  row.columns["values"] = {0, 1, 5, 0, 2, 8};
  row.finish_reason = "length";
  return row;
}

TEST(SetAdvantages, AdvantagesByTurnEqualAReaLsTest) {
  ActorSettings settings = actor_with("path");
  AdvantageSettings& advantages = settings.advantages;
  advantages.gae_timestep_unit = "turn";
  advantages.bootstrap_truncated = true;
  advantages.discount = 0.5;
  advantages.gae_lambda = 0.25;
  advantages.adv_norm = {"none", "none"};
  std::vector<Trajectory> batch{turns_of_areal()};
  set_advantages(batch, settings, {});
  EXPECT_EQ(batch[0].advantage, (std::vector<float>{0, 3.75, 3.75, 0, 6, 6}));
  EXPECT_EQ(batch[0].columns.at("returns"), (std::vector<double>{0, 4.75, 4.75, 0, 8, 8}));

  // The same conversation in two rows of the batch.
  batch = {turns_of_areal(), turns_of_areal()};
  for (Trajectory& row : batch) row.trajectory = "t";
  batch[0].loss_mask = {0, 1, 1, 0, 0, 0};
  batch[1].loss_mask = {0, 0, 0, 0, 1, 1};
  set_advantages(batch, settings, {});
  EXPECT_EQ(batch[0].advantage, (std::vector<float>{0, 3.75, 3.75, 0, 0, 0}));
  EXPECT_EQ(batch[1].advantage, (std::vector<float>{0, 0, 0, 0, 6, 6}));
  EXPECT_EQ(batch[1].columns.at("returns"), (std::vector<double>{0, 0, 0, 0, 8, 8}));

  // Here the column has the values of the generated tokens only. Rollout files may have this form.
  batch = {turns_of_areal()};
  batch[0].columns["values"] = {1, 5, 2, 8};
  set_advantages(batch, settings, {});
  EXPECT_EQ(batch[0].advantage[1], 3.75f);
}

TEST(SetAdvantages, TheRewardBeyondTheTurnsIsAtTheLastToken) {
  ActorSettings settings = actor_with("path");
  settings.advantages.adv_estimator = "turn_returns";
  settings.advantages.turn_discount = 0.5;
  std::vector<Trajectory> batch{turns_of_areal(), turns_of_areal(), turns_of_areal()};
  batch[0].reward = 10;           // turn rewards 3 and 4, and 3 more at the end
  batch[1].turn_rewards.clear();  // reward 7 at the end
  batch[2].turns.clear();         // a row without turns is one turn
  batch[2].turn_rewards.clear();
  set_advantages(batch, settings, {});
  EXPECT_EQ(batch[0].advantage, (std::vector<float>{0, 6.5, 6.5, 0, 7, 7}));
  EXPECT_EQ(batch[1].advantage, (std::vector<float>{0, 3.5, 3.5, 0, 7, 7}));
  EXPECT_EQ(batch[2].advantage, (std::vector<float>{0, 7, 7, 0, 7, 7}));
  EXPECT_EQ(batch[0].columns.count("returns"), 0u);
  batch = {turns_of_areal()};
  batch[0].turns.clear();
  EXPECT_THROW(set_advantages(batch, settings, {}), UserError);
}

TEST(SetAdvantages, ValuesAreAskedForOfTrainedSequencesOnly) {
  ActorSettings settings = actor_with("path");
  settings.filters.truncated_samples = "mask";
  std::vector<Trajectory> batch = scored_batch(2);
  int64_t asked = 0;
  set_advantages(batch, settings, {}, {}, [&](std::vector<Trajectory>& rows) {
    for (Trajectory& row : rows) {
      EXPECT_EQ(row.trained, row.finish_reason != "length");
      if (!row.in_loss() || !row.trains_a_token()) continue;
      ++asked;
      const std::vector<double> values(8, 0.5);
      set_trained_column(row, kValuesColumn, values.data());
    }
  });
  EXPECT_EQ(asked, 5);
  for (const Trajectory& row : batch)
    EXPECT_EQ(row.columns.count("returns"), row.in_loss() && row.trains_a_token() ? 1u : 0u);
  std::vector<Trajectory> without = scored_batch(1);
  EXPECT_THROW(set_advantages(without, settings, {}), UserError) << "nobody has values";
}

// With gae and reinforce_plus_plus, the KL's reward of a token is discounted and whitened like its other
// rewards, and the critic learns returns that include it.
TEST(KlRewards, AreRewardsOfTheirTokens) {
  for (const std::string estimator : {"gae", "reinforce_plus_plus"}) {
    const bool is_gae = estimator == "gae";
    auto model = small_model(at::kDouble, 1), reference = small_model(at::kDouble, 2),
         backbone = small_model(at::kDouble, 3);
    ActorSettings settings = actor_with("path");
    settings.advantages.adv_estimator = estimator;
    settings.advantages.discount = 0.9;
    settings.advantages.gae_lambda = 0.8;
    settings.loss.kl_ctl = 0.25;
    Critic critic(*backbone, critic_settings(), settings, 10);
    randomise(critic);
    const SteadyClock clock;
    Trainer trainer(*model, reference.get(), settings, 10, clock, {.critic = is_gae ? &critic : nullptr});
    std::vector<Trajectory> batch = scored_batch(3);
    set_advantages(batch, settings, {}, {}, [&](std::vector<Trajectory>& rows) { trainer.set_values(rows); });

    const TrainBatch plain = make_batch(batch, {}, at::kDouble);
    const auto plan = make_plan("path", plan_request(plain, 4096));
    const at::Tensor kl_R = Executor(*model).execute_forward(plan, plain).log_probs_R -
                            Executor(*reference).execute_forward(plan, plain).log_probs_R;
    std::vector<double> expected;
    double mean_kl = 0, num_trained = 0;
    for (size_t s = 0; s < batch.size(); ++s) {
      const int64_t begin = plain.row_offset[s], count = plain.row_offset[s + 1] - begin;
      if (count == 0) continue;
      ++num_trained;
      mean_kl += kl_R.narrow(0, begin, count).mean().item<double>();
      const std::vector<double> values = trained_column(batch[s], kValuesColumn);
      const std::vector<double> returns = trained_column(batch[s], kReturnsColumn);
      EXPECT_EQ(std::ssize(returns), is_gae ? count : 0);
      std::vector<double> advantages(static_cast<size_t>(count));
      double next_advantage = 0, next_value = 0;
      for (int64_t t = count; t-- > 0;) {
        const auto i = static_cast<size_t>(t);
        double reward = -0.25 * kl_R[begin + t].item<double>();
        if (t + 1 == count) reward += *batch[s].reward;
        const double value = is_gae ? values.at(i) : 0, lambda = is_gae ? 0.8 : 1;
        next_advantage = reward + 0.9 * next_value - value + 0.9 * lambda * next_advantage;
        next_value = value;
        advantages[i] = next_advantage;
        if (is_gae) {
          EXPECT_NEAR(returns[i], next_advantage + value, 1e-12);
        }
      }
      expected.insert(expected.end(), advantages.begin(), advantages.end());
    }
    const at::Tensor raw = at::tensor(expected, at::kDouble);
    const at::Tensor whitened = (raw - raw.mean()) / (raw.var() + 1e-8).sqrt();
    EXPECT_LT((plain.fields.advantages_R - whitened).abs().max().item<double>(), 1e-6) << "floats";
    const MetricValues metrics = trainer.train_step(batch);
    EXPECT_EQ(metrics.at("kl_ctl/coef"), 0.25);
    EXPECT_NEAR(metrics.at("kl_ctl/kl"), mean_kl / num_trained, 1e-12);
  }
}

}  // namespace
}  // namespace bough

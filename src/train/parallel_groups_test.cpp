// Compares parallel training with one rank. Ranks are threads of this process, each with a copy of the model.
#include "train/parallel_groups.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <limits>
#include <numeric>
#include <random>
#include <thread>

#include "algo/loss.h"
#include "base/error.h"
#include "plan/test_costs.h"
#include "train/context_parallel.h"
#include "train/gradient_step.h"
#include "train/optimizer.h"
#include "train/ranks_test_util.h"

namespace bough {
namespace {

struct RankResult {
  ExecutionResult execution;
  std::unique_ptr<Model> model;
  int64_t num_tokens = 0;
};

std::vector<RankResult> on_ranks(int64_t num_ranks, uint64_t seed, const RandomBatch& r, const Loss& loss) {
  auto ranks = thread_communicators(num_ranks);
  std::vector<RankResult> results(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < num_ranks; ++rank)
    threads.emplace_back([&, rank] {
      RankResult& result = results[static_cast<size_t>(rank)];
      Communicator& group = *ranks[static_cast<size_t>(rank)];
      group.set_deadline(60);
      result.model = random_model(seed, at::kDouble);
      result.model->allocate_gradients();
      const char* const strategy = (seed + static_cast<uint64_t>(rank)) % 2 == 0 ? "blocks" : "path";
      const Plan plan = plan_shard(strategy, plan_request(r.batch, 32), rank, num_ranks);
      result.num_tokens = num_planned_tokens(plan);
      result.execution = Executor(*result.model, {.ranks = &group}).execute(plan, r.batch, loss);
      sum_gradients(*result.model, &group);
    });
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(Ranks, HaveTheFlatBatchsGradientWhateverTheirNumber) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const auto r = random_batch(seed, 100);
    // One loss in three has coupling scope `sequence`.
    LossSettings settings;
    settings.loss = seed % 3 == 0 ? "gspo" : "ppo";
    settings.entropy_coef = 0.1;
    settings.kl_loss_coef = 0.05;
    const auto loss = make_loss(settings);
    const auto model = random_model(seed, at::kDouble);
    FlatResult flat = FlatReference(*model).run(r->batch, *loss);
    const int64_t num_ranks = int64_t{1} << (seed % 4);
    const auto results = on_ranks(num_ranks, seed, *r, *loss);
    for (const RankResult& rank : results) {
      ASSERT_NEAR(rank.execution.loss, flat.loss, 1e-10 * std::max(1.0, std::abs(flat.loss))) << seed;
      ASSERT_LE(gradient_error(*rank.model, flat), 1e-10) << num_ranks << " ranks, seed " << seed;
      if (r->batch.num_rows() > 0) {
        ASSERT_LE((rank.execution.values.log_probs_R - flat.log_probs_R).abs().max().item<double>(), 1e-10)
            << seed;
      }
      ASSERT_EQ(rank.execution.metrics.size(), results[0].execution.metrics.size()) << seed;
      for (const auto& [name, metric] : rank.execution.metrics)
        ASSERT_EQ(metric.value(), results[0].execution.metrics.at(name).value()) << name;
    }
    // A cut between ranks repeats at most one path.
    int64_t tokens = 0, longest = 0;
    for (const RankResult& rank : results) tokens += rank.num_tokens;
    for (const TokenSpan& sequence : r->batch.sequences)
      longest = std::max<int64_t>(longest, std::ssize(sequence));
    const int64_t tree = build_prefix_tree(r->batch.sequences).num_tokens();
    ASSERT_LE(tokens, tree + (num_ranks - 1) * longest) << seed;
  }
}

// Every kind of parallelism and every pair of kinds. Passes are so small that some context-parallel ranks
// have no token.
TEST(Ranks, HaveTheFlatBatchsGradientForEveryKindOfParallelism) {
  std::vector<ParallelSizes> kinds = kSharedPasses;
  kinds.insert(kinds.end(), kPipelines.begin(), kPipelines.end());
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const ParallelSizes& sizes = kinds[seed % kinds.size()];
    const auto r = random_batch(seed, 80);
    LossSettings settings;
    settings.loss = seed % 5 == 0 ? "gspo" : "ppo";
    settings.entropy_coef = 0.1;
    settings.kl_loss_coef = 0.05;
    const auto loss = make_loss(settings);
    const auto whole = random_model(staged_config(seed, sizes.pipeline), seed, at::kDouble);
    FlatResult flat = FlatReference(*whole).run(r->batch, *loss);
    double worst = 0, loss_error = 0, value_error = 0;
    on_rank_groups(sizes, *whole, [&](TrainingRanks& groups, Model& model) {
      model.allocate_gradients();
      const int64_t most = sizes.context > 1 && seed % 2 == 1 ? 5 : 24;
      // Ranks that split passes must choose the same plan.
      const char* const strategies[] = {"path", "blocks", "blocks", "dense"};
      const Plan plan = with_random_keeps(plan_shard(strategies[seed % 4], plan_request(r->batch, most),
                                                     groups.replica(), groups.num_replicas()),
                                          seed);
      const ExecutionResult execution = Executor(model, {.head_chunk_rows = 7,
                                                         .verify_recompute = seed / kinds.size() % 2 == 0,
                                                         .ranks = groups.loss_group(),
                                                         .context_ranks = groups.context()})
                                            .execute(plan, r->batch, *loss);
      sum_gradients(model, groups.data_parallel_group());
      const NamedTensors gradients = named_gradients(model);
      // In a pipeline, the first stage collects the gradients of all layers, so only it compares.
      if (groups.all()->rank() != (sizes.pipeline > 1 ? 0 : sizes.all() - 1)) return;
      worst = gradient_error(gradients, flat);
      loss_error = std::abs(execution.loss - flat.loss);
      if (r->batch.num_rows() > 0)
        value_error = std::max((execution.values.log_probs_R - flat.log_probs_R).abs().max().item<double>(),
                               (execution.values.entropies_R - flat.entropies_R).abs().max().item<double>());
    });
    const std::string what = str("seed ", seed, ": ", sizes.data, " x ", sizes.context, " x ", sizes.tensor,
                                 " x ", sizes.pipeline);
    ASSERT_LE(worst, 1e-10) << what;
    ASSERT_LE(loss_error, 1e-10 * std::max(1.0, std::abs(flat.loss))) << what;
    ASSERT_LE(value_error, 1e-10) << what;
  }
}

TEST(Ranks, MetricsAreThoseOfTheWholeBatch) {
  const auto r = random_batch(7, 100);
  const auto loss = full_loss();
  const auto one = on_ranks(1, 7, *r, *loss), four = on_ranks(4, 7, *r, *loss);
  ASSERT_FALSE(one[0].execution.metrics.empty());
  for (const auto& [name, metric] : one[0].execution.metrics)
    EXPECT_NEAR(four[3].execution.metrics.at(name).value(), metric.value(),
                1e-9 * std::max(1.0, std::abs(metric.value())))
        << name;
}

// Runs each rank in its own thread, with a model and an optimizer.
template <class Work>
std::vector<std::unique_ptr<Model>> optimize_on(int64_t num_ranks, at::ScalarType type, const Work& work) {
  auto ranks = thread_communicators(num_ranks);
  std::vector<std::unique_ptr<Model>> models(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < num_ranks; ++rank)
    threads.emplace_back([&, rank] {
      Communicator& group = *ranks[static_cast<size_t>(rank)];
      group.set_deadline(60);
      auto& model = models[static_cast<size_t>(rank)];
      model = random_model(5, type);
      Optimizer optimizer(*model, {.lr = 0.01, .weight_decay = 0.1, .gradient_clipping = 1}, 40, &group);
      work(optimizer, *model, group);
      optimizer.check_integrity();
    });
  for (std::thread& thread : threads) thread.join();
  return models;
}

// Takes optimizer steps [from, to) with random gradients. The ranks' gradients differ, but their sum is the
// same for any number of ranks, up to rounding.
void take_steps(Optimizer& optimizer, Model& model, const Communicator& ranks, int64_t from, int64_t to) {
  const double whole = static_cast<double>(ranks.size() * (ranks.size() + 1) / 2);
  for (int64_t step = from; step < to; ++step) {
    auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
    for (const Parameter* parameter : model.trained_parameters())
      parameter->main_grad.add_(
          at::randn(parameter->value.sizes(), generator, at::TensorOptions().dtype(at::kDouble))
              .mul_(static_cast<double>(ranks.rank() + 1) / whole));
    optimizer.step();
  }
}

double largest_difference(Model& one, Model& other) {
  double largest = 0;
  const auto theirs = other.parameters();
  for (size_t i = 0; i < theirs.size(); ++i)
    largest = std::max(
        largest, (one.parameters()[i]->value - theirs[i]->value).abs().to(at::kDouble).max().item<double>());
  return largest;
}

TEST(Ranks, ShareTheOptimizerAndStepAsOne) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const auto work = [](Optimizer& optimizer, Model& model, Communicator& ranks) {
      take_steps(optimizer, model, ranks, 0, 20);
    };
    const auto one = optimize_on(1, type, work);
    ASSERT_GT(largest_difference(*one[0], *random_model(5, type)), 0.05) << "nothing was trained";
    // A bf16 weight is the rounded fp32 master. If the master differs in its last bit, it can round to
    // another weight.
    const double bound = type == at::kDouble ? 1e-10 : type == at::kFloat ? 1e-5 : 1e-2;
    for (const int64_t num_ranks : {2, 3, 4, 8}) {
      const auto several = optimize_on(num_ranks, type, work);
      for (const auto& model : several) {
        EXPECT_LE(largest_difference(*one[0], *model), bound) << num_ranks << " ranks of " << type;
        EXPECT_EQ(largest_difference(*several[0], *model), 0) << "ranks differ in their weights";
      }
    }
  }
}

TEST(Ranks, AnyNumberLoadsTheCheckpointOfAnyNumber) {
  const auto folder = std::filesystem::temp_directory_path() / str("bough_ranks_", getpid());
  for (const auto type : {at::kDouble, at::kBFloat16}) {
    const auto whole = optimize_on(1, type, [](Optimizer& optimizer, Model& model, Communicator& ranks) {
      take_steps(optimizer, model, ranks, 0, 10);
    });
    for (const int64_t before : {1, 4})
      for (const int64_t after : {1, 2, 8}) {
        std::filesystem::create_directories(folder);
        const auto saved =
            optimize_on(before, type, [&](Optimizer& optimizer, Model& model, Communicator& ranks) {
              take_steps(optimizer, model, ranks, 0, 5);
              const OptimizerSnapshot snapshot = optimizer.snapshot(/*copies=*/true);
              if (ranks.rank() == 0) snapshot.save(folder);
            });
        const auto gone_on =
            optimize_on(after, type, [&](Optimizer& optimizer, Model& model, Communicator& ranks) {
              for (size_t i = 0; i < model.parameters().size(); ++i)
                model.parameters()[i]->value.copy_(saved[0]->parameters()[i]->value);
              optimizer.load(folder);
              take_steps(optimizer, model, ranks, 5, 10);
            });
        for (const auto& model : gone_on) {
          EXPECT_LE(largest_difference(*whole[0], *model), type == at::kDouble ? 1e-10 : 1e-2)
              << before << " ranks, then " << after;
        }
        std::filesystem::remove_all(folder);
      }
  }
}

// A rank sends no more than it must: to each other rank, the receiver's shard of each gradient, the sender's
// shard of the weights, and 8 bytes for the gradient norm.
TEST(Ranks, SendThePredictedBytes) {
  for (const int64_t num_ranks : {1, 2, 4}) {
    optimize_on(num_ranks, at::kBFloat16, [&](Optimizer& optimizer, Model& model, Communicator& ranks) {
      const double before = ranks.bytes_sent();
      take_steps(optimizer, model, ranks, 0, 1);
      double expected = 0;
      for (const Parameter* parameter : model.trained_parameters()) {
        const double share = std::ceil(static_cast<double>(parameter->value.numel()) / num_ranks);
        expected += static_cast<double>(num_ranks - 1) * share * (4 + 2);  // fp32 gradients, bf16 weights
        expected += static_cast<double>(num_ranks - 1) * 8;                // this rank's part of the norm
      }
      EXPECT_EQ(ranks.bytes_sent() - before, expected);
      const double of_all_reduce = ranks.bytes_sent();
      std::vector<float> values(1000);
      ranks.all_reduce(std::span<float>(values));
      EXPECT_EQ(ranks.bytes_sent() - of_all_reduce,
                2 * 4000.0 * static_cast<double>(num_ranks - 1) / static_cast<double>(num_ranks));
    });
  }
}

TEST(Ranks, FixedSharesHaveTheSameBitsWhateverTheirNumber) {
  for (const uint64_t seed : {1, 2, 3, 4, 5, 6}) {
    const auto r = random_batch(seed, 100);
    ActorSettings settings;
    settings.deterministic = true;
    settings.loss.loss = "ppo";
    const auto type = at::kDouble;
    std::vector<std::unique_ptr<Model>> first;
    for (const int64_t num_ranks : {1, 2, 4, 8}) {
      auto ranks = thread_communicators(num_ranks);
      std::vector<std::unique_ptr<Model>> models(static_cast<size_t>(num_ranks));
      std::vector<std::thread> threads;
      std::vector<double> losses(static_cast<size_t>(num_ranks));
      for (size_t rank = 0; rank < models.size(); ++rank)
        threads.emplace_back([&, rank] {
          Communicator& group = *ranks[rank];
          group.set_deadline(60);
          models[rank] = random_model(seed, type);
          TrainingRanks all(&group, {.data = num_ranks});
          all.set_deadline(60);
          Optimizer optimizer(*models[rank], {.lr = 0.01}, 10, all.data_parallel_group(),
                              /*fixed_shards=*/true);
          GradientStep step(*models[rank], {}, settings, nullptr, &all);
          step.leave_sums_over_ranks();
          for (int i = 0; i < 3; ++i) {
            losses[rank] = step.add_gradient(step.plan(r->batch, "blocks"), r->batch).loss;
            optimizer.step();
          }
        });
      for (std::thread& thread : threads) thread.join();
      for (const double loss : losses) EXPECT_EQ(loss, losses[0]);
      if (first.empty()) first = std::move(models);
      else
        for (const auto& model : models)
          EXPECT_EQ(largest_difference(*first[0], *model), 0) << num_ranks << " ranks, seed " << seed;
    }
    EXPECT_GT(largest_difference(*first[0], *random_model(seed, type)), 1e-4) << "nothing was trained";
  }
}

// Eight prompts of 100 to 200 tokens, each with four samples of 50 to 300 tokens. Leaves are in depth-first
// order.
std::vector<std::vector<int32_t>> groups_of_samples(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::vector<int32_t>> sequences;
  for (int group = 0; group < 8; ++group) {
    std::vector<int32_t> prompt(100 + random() % 100);
    for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 100);
    for (int sample = 0; sample < 4; ++sample) {
      sequences.push_back(prompt);
      for (size_t more = 50 + random() % 250; more > 0; --more)
        sequences.back().push_back(static_cast<int32_t>(random() % 100));
    }
  }
  std::ranges::sort(sequences);
  return sequences;
}

// balance_load adds up the costs of tokens and (query, key) pairs, without the cost per pass. The test
// compares the predicted seconds of the slowest rank's plan with the best of all ways to cut the ordered
// leaves.
TEST(Ranks, TheSlowestIsPredictedToTakeLittleMoreThanUnderTheBestCut) {
  const TestCosts costs;
  double worst = 1, sum = 0;
  int64_t count = 0;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    const auto sequences = groups_of_samples(seed);
    PlanRequest request{
        .sequences = {sequences.begin(), sequences.end()}, .max_tokens_per_pass = 512, .costs = &costs};
    const size_t size = sequences.size();
    std::vector<std::vector<double>> seconds(size, std::vector<double>(size + 1));  // [i][j]: leaves [i, j)
    for (size_t i = 0; i < size; ++i)
      for (size_t j = i + 1; j <= size; ++j) {
        std::vector<int64_t> own(j - i);
        std::iota(own.begin(), own.end(), static_cast<int64_t>(i));
        seconds[i][j] = simulate(make_plan("blocks", part_of(request, own)), &costs).seconds;
      }
    std::vector<double> best = seconds[0];  // [j]: leaves [0, j) on num_ranks ranks; best[0] is 0
    for (int64_t num_ranks = 2; num_ranks <= 8; ++num_ranks) {
      std::vector<double> next(size + 1, std::numeric_limits<double>::infinity());
      next[0] = 0;
      for (size_t j = 1; j <= size; ++j)
        for (size_t i = 0; i < j; ++i) next[j] = std::min(next[j], std::max(best[i], seconds[i][j]));
      best = next;
      double slowest = 0;
      for (int64_t rank = 0; rank < num_ranks; ++rank)
        slowest = std::max(slowest, simulate(plan_shard("blocks", request, rank, num_ranks), &costs).seconds);
      worst = std::max(worst, slowest / best[size]);
      sum += slowest / best[size];
      ++count;
    }
  }
  std::cout << "slowest rank over the best cut's: mean " << sum / static_cast<double>(count) << ", worst "
            << worst << std::endl;
  EXPECT_LE(worst, 1.05);
}

// Context-parallel ranks split activations, but not the keys and values of the prefix KV stack. If memory
// bounds the passes, two context-parallel ranks make larger and fewer passes than one rank.
TEST(Ranks, WithContextParallelismCostsAreThoseOfOneRank) {
  const auto whole = std::make_shared<TestCosts>();
  EXPECT_EQ(context_costs(whole, 1), whole);
  const auto costs = context_costs(whole, 2);
  const PassShape pass{.tokens = 101, .stack_rows = 40, .pairs = 5000, .head_rows = 7};
  const PassShape own{.tokens = 51, .stack_rows = 40, .pairs = 2500, .head_rows = 4};
  EXPECT_EQ(costs->forward_seconds(pass), whole->forward_seconds(own));
  EXPECT_EQ(costs->backward_seconds(pass), whole->backward_seconds(own));
  EXPECT_EQ(costs->temporary_bytes(pass, RecomputePolicy::kActivations),
            whole->temporary_bytes(own, RecomputePolicy::kActivations));
  EXPECT_EQ(costs->kept_bytes(RecomputePolicy::kActivations),
            (whole->kept_bytes(RecomputePolicy::kActivations) + 1) / 2 + whole->stack_row_bytes());
  EXPECT_EQ(costs->kept_bytes(RecomputePolicy::kKeysValues), 0);
  const auto sequences = groups_of_samples(5);
  PlanRequest request{
      .sequences = {sequences.begin(), sequences.end()}, .max_tokens_per_pass = 4096, .costs = whole.get()};
  request.memory_bytes = simulate(make_plan("blocks", request), whole.get()).peak_bytes / 4;
  const auto plan_of = [&](const PassCosts* of) {
    request.costs = of;
    const Simulation simulation = simulate(make_plan("auto", request), of);
    EXPECT_LE(simulation.peak_bytes, *request.memory_bytes);
    std::cout << simulation.num_passes << " passes, " << simulation.tokens_recomputed << " recomputed, "
              << simulation.seconds << " s" << std::endl;
    return simulation;
  };
  const Simulation alone = plan_of(whole.get()), shared = plan_of(costs.get());
  EXPECT_LT(shared.num_passes, alone.num_passes);
  EXPECT_LT(shared.seconds, alone.seconds);
}

TEST(Ranks, TheCutFollowsTheCostsOfTokensAndPairs) {
  EXPECT_EQ(balance_weights(nullptr).per_pair, 0);
  const TestCosts costs;
  const BalanceWeights weights = balance_weights(&costs);
  EXPECT_GT(weights.per_token, 0);
  EXPECT_GE(weights.per_pair, 0);
}

}  // namespace
}  // namespace bough

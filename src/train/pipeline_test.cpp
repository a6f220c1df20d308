// Tests of pipeline parallelism: cut of the layers, checkpoints, adapters, bytes sent.
// parallel_groups_test.cpp tests the gradients.
#include "models/pipeline_stage.h"

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "algo/loss.h"
#include "base/error.h"
#include "models/checkpoint.h"
#include "models/lora.h"
#include "plan/pipeline_schedule.h"
#include "plan/test_costs.h"
#include "train/gradient_step.h"
#include "train/optimizer.h"
#include "train/ranks_test_util.h"
#include "train/step_metrics.h"
#include "tree/prefix_tree.h"

namespace bough {
namespace {

ModelConfig deep_config(uint64_t seed, int64_t num_layers = 4) {
  ModelConfig config = shared_config(seed);
  config.num_layers = num_layers;
  config.layer_ropes.clear();
  return config;
}

TEST(Pipeline, LayersAreCutByTheirWork) {
  ModelConfig config = deep_config(0, 12);
  config.vocab_size = 1;
  EXPECT_EQ(cut_layers(config, 1), (std::vector<int64_t>{0, 12}));
  EXPECT_EQ(cut_layers(config, 3), (std::vector<int64_t>{0, 4, 8, 12}));
  // The lm_head costs as much as 2.5 layers, so the last stage gets fewer layers.
  const double layer =
      2.0 * 24 * (8.0 * static_cast<double>(2 * config.num_heads + 2 * config.num_kv_heads) + 3 * 40) +
      4.0 * static_cast<double>(config.query_width()) * kCutContext;
  config.vocab_size = static_cast<int64_t>(2.5 * layer / (2 * 24));
  EXPECT_EQ(cut_layers(config, 3), (std::vector<int64_t>{0, 5, 10, 12}));
  EXPECT_EQ(stage_of(config, 2, 3).first_layer, 10);
  EXPECT_EQ(stage_of(config, 2, 3).num_layers, 2);
  config.vocab_size *= 100;
  EXPECT_EQ(cut_layers(config, 2), (std::vector<int64_t>{0, 11, 12}));
  try {
    cut_layers(config, 13);
    FAIL() << "more stages than layers";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("13 stages for a model with 12 layers"), std::string::npos);
  }
}

// Twenty optimizer steps are compared with those of one process. Then other numbers of ranks load the
// pipeline's checkpoint and continue.
TEST(Pipeline, StepsAndCheckpointsAreOneProcesss) {
  for (const bool tied : {true, false}) {
    const auto r = random_batch(4, 80);
    const auto loss = full_loss();
    ModelConfig config = deep_config(4);
    config.tie_word_embeddings = tied;
    const OptimizerSettings settings{.lr = 0.01, .weight_decay = 0.1, .gradient_clipping = 0.5};
    const auto folder = std::filesystem::temp_directory_path() / str("pipeline_test_", getpid());
    const auto steps = [&](Model& model, Optimizer& optimizer, const TrainingRanks* groups, int64_t from,
                           int64_t to) {
      return take_steps(model, optimizer, groups, r->batch, *loss, to - from);
    };
    const auto one = random_model(config, 4, at::kDouble);
    const auto start = random_model(config, 4, at::kDouble);
    Optimizer optimizer(*one, settings, 20);
    const double norm = steps(*one, optimizer, nullptr, 0, 20);
    const auto expect_same = [&](const NamedTensors& weights) {
      expect_same_weights(weights, named_weights(*one));
    };
    on_rank_groups({.data = 2, .pipeline = 3}, *start, [&](TrainingRanks& groups, Model& model) {
      Optimizer shared(model, settings, 20, groups.data_parallel_group());
      steps(model, shared, &groups, 0, 10);
      const OptimizerSnapshot snapshot = shared.snapshot(true);
      const NamedTensors weights = named_weights(model);
      if (groups.is_rank_zero()) {
        std::filesystem::create_directories(folder / "model");
        snapshot.save(folder);
        write_safetensors(folder / "model" / "model.safetensors", weights);
      }
      EXPECT_NEAR(steps(model, shared, &groups, 10, 20), norm, 1e-9 * norm);
      const NamedTensors last = named_weights(model);
      if (groups.is_rank_zero()) expect_same(last);
    });
    for (const ParallelSizes sizes :
         {ParallelSizes{}, ParallelSizes{.pipeline = 2}, ParallelSizes{.tensor = 2},
          ParallelSizes{.tensor = 2, .pipeline = 2}}) {
      on_rank_groups(sizes, *start, [&](TrainingRanks& groups, Model& model) {
        load_weights(folder / "model", model);
        Optimizer shared(model, settings, 20, groups.data_parallel_group());
        shared.load(folder);
        steps(model, shared, groups.all() ? &groups : nullptr, 10, 20);
        const NamedTensors last = named_weights(model);
        if (!groups.all() || groups.is_rank_zero()) expect_same(last);
      });
    }
    std::filesystem::remove_all(folder);
  }
}

// Adapters on all layers, or on some modules of one layer. In the second case only one stage has adapters.
TEST(Pipeline, AdaptersHaveTheUnshardedModelsGradientsInitialValuesAndSteps) {
  for (uint64_t seed = 0; seed < 36; ++seed) {
    const auto r = random_batch(seed, 80);
    const auto loss = full_loss();
    const ModelConfig config = deep_config(seed);
    LoraSettings lora{.rank = 3};
    const std::string layer = str("layers.", seed / 2 % 4, ".");
    if (seed % 2 == 1) lora.targets = {{layer + "self_attn.v_proj"}, {layer + "mlp.down_proj"}};
    if (seed % 3 > 0) lora.targets.push_back({"lm_head"});
    const auto whole = random_model(config, seed, at::kDouble);
    const auto one = random_model(config, seed, at::kDouble);
    add_adapter(*one, lora, seed);
    std::map<std::string, at::Tensor> sampled;
    for (const auto& [name, value] : adapter_tensors(*one)) sampled[name] = value.clone();
    fill_trained(*one);
    one->allocate_gradients();
    const Plan plan = plan_shard("blocks", plan_request(r->batch, 24), 0, 1);
    Executor(*one).execute(plan, r->batch, *loss);
    std::map<std::string, at::Tensor> expected;
    for (const auto& [name, gradient] : named_gradients(*one)) expected[name] = gradient;
    const OptimizerSettings settings{.lr = 0.01, .gradient_clipping = 0.5};
    const auto stepped = random_model(config, seed, at::kDouble);
    add_adapter(*stepped, lora, seed);
    fill_trained(*stepped);
    Optimizer of_one(*stepped, settings, 2);
    const double norm = take_steps(*stepped, of_one, nullptr, r->batch, *loss, 2);
    const ParallelSizes kinds[] = {{.pipeline = 3}, {.tensor = 2, .pipeline = 2}, {.data = 2, .pipeline = 2}};
    const ParallelSizes sizes = kinds[seed / 8 % 3];
    const auto copy = random_model(config, seed, at::kDouble);
    add_adapter(*copy, lora, seed);
    on_rank_groups(sizes, *whole, [&](TrainingRanks& groups, Model& model) {
      add_adapter(model, lora, seed);
      if (!model.tensor_ranks()) {
        for (const auto& [name, value] : adapter_tensors(model))
          EXPECT_TRUE(value.equal(sampled.at(name))) << name;
      }
      fill_trained(model);
      model.allocate_gradients();
      const Plan own = plan_shard("blocks", plan_request(r->batch, 24), groups.replica(), sizes.data);
      Executor(model, {.ranks = groups.loss_group()}).execute(own, r->batch, *loss);
      sum_gradients(model, groups.data_parallel_group());
      const NamedTensors gradients = named_gradients(model);
      Model* const gathered = groups.is_rank_zero() ? copy.get() : nullptr;
      if (groups.replica() == 0) gather_weights(model, gathered);
      if (gathered) {
        expect_same_gradients(gradients, expected, seed);
        const auto whole_tensors = adapter_tensors(*one), tensors = adapter_tensors(*gathered);
        for (size_t i = 0; i < tensors.size(); ++i)
          EXPECT_TRUE(tensors[i].second.equal(whole_tensors[i].second)) << tensors[i].first;
      }
      model.zero_gradients();
      Optimizer shared(model, settings, 2, groups.data_parallel_group());
      EXPECT_NEAR(take_steps(model, shared, &groups, r->batch, *loss, 2), norm, 1e-9 * norm) << seed;
      const OptimizerSnapshot snapshot = shared.snapshot(/*copies=*/true);
      if (groups.replica() == 0) gather_weights(model, gathered);
      if (!gathered) return;
      expect_same_weights(adapter_tensors(*gathered), adapter_tensors(*stepped));
      EXPECT_EQ(snapshot.tensors.size(), of_one.snapshot(/*copies=*/false).tensors.size()) << seed;
    });
  }
}

// A forward-only plan execution on several stages gives the values of one process: log-probabilities,
// entropies, the policy's 9 most likely tokens, and the log-probabilities of the batch's top-k tokens.
TEST(Pipeline, ForwardValuesAreTheUnshardedModels) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto r = random_batch(seed, 80);
    add_top_k_tokens(*r, seed);
    if (r->batch.num_rows() == 0) continue;
    const auto whole = random_model(deep_config(seed), seed, at::kDouble);
    const Plan plan = plan_shard(seed % 2 == 0 ? "blocks" : "path", plan_request(r->batch, 24), 0, 1);
    const RowValues one = Executor(*whole).execute_forward(plan, r->batch, {.top_k = 9});
    on_rank_groups(
        {.pipeline = 2 + static_cast<int64_t>(seed % 3)}, *whole, [&](TrainingRanks& groups, Model& model) {
          const RowValues values =
              Executor(model, {.ranks = groups.loss_group()}).execute_forward(plan, r->batch, {.top_k = 9});
          const auto is_close = [](const at::Tensor& a, const at::Tensor& b) {
            return (a - b).abs().max().item<double>() <= 1e-12;
          };
          EXPECT_TRUE(is_close(values.log_probs_R, one.log_probs_R)) << seed;
          EXPECT_TRUE(is_close(values.entropies_R, one.entropies_R)) << seed;
          EXPECT_TRUE(is_close(values.top_k_log_probs_RK, one.top_k_log_probs_RK)) << seed;
          EXPECT_TRUE(values.top_ids_RK.equal(one.top_ids_RK)) << seed;
        });
  }
}

// `bough step` and a run's metrics report the seconds of the pipeline schedule, not those of one process.
TEST(Pipeline, AStepsPredictedSecondsAreItsSchedules) {
  const auto whole = random_model(deep_config(6), 6, at::kDouble);
  std::vector<Trajectory> rows;
  for (int32_t sample = 0; sample < 16; ++sample) {
    std::vector<int32_t> tokens(40, sample % 5);
    tokens[1] = sample / 5;
    rows.push_back(trajectory_of(tokens, std::vector<uint8_t>(40, 1)));
    rows.back().advantage = {1.0f};
  }
  std::vector<const Trajectory*> pointers;
  std::vector<TokenSpan> sequences;
  for (const Trajectory& row : rows) {
    pointers.push_back(&row);
    sequences.emplace_back(row.input_ids);
  }
  const PrefixTree tree = build_prefix_tree(sequences);
  ActorSettings settings;
  settings.loss.loss = "pg";
  settings.mb_spec.max_tokens_per_mb = 120;
  const TestCosts costs;
  on_rank_groups({.pipeline = 3}, *whole, [&](TrainingRanks& groups, Model& model) {
    StepTimer timer(model, {}, settings, rows, {.strategy = "dense", .costs = &costs, .ranks = &groups});
    timer.run(/*counted=*/true);
    const double seconds = timer.simulation().seconds;
    GradientStep step(model, {}, settings, &costs, &groups);
    const Plan plan = step.plan(step.rows_of(pointers), "dense");
    EXPECT_EQ(seconds, pipeline_seconds(plan, costs, {.num_stages = 3}));
    EXPECT_LT(seconds, 0.8 * simulate(plan, &costs).seconds);
    const MetricValues metrics = tree_metrics(tree, {&plan}, &costs, /*seconds=*/2, &groups);
    EXPECT_EQ(metrics.at("tree/predicted_over_measured"), seconds / 2);
  });
}

// docs/ranks.md says what a stage sends per pass: hidden states to the next stage, their gradient to the
// previous one.
TEST(Pipeline, SendsThePredictedBytes) {
  ModelConfig config = deep_config(6);
  config.tie_word_embeddings = true;
  const auto whole = random_model(config, 6, at::kFloat);
  const std::vector<Trajectory> rows = {
      trajectory_of(std::vector<int32_t>(40, 3), std::vector<uint8_t>(40, 1))};
  TrainBatch batch = make_batch(rows, {}, at::kFloat);
  batch.fields.advantages_R = at::ones({batch.num_rows()});
  const auto loss = make_loss({.loss = "pg"});
  on_rank_groups({.pipeline = 3}, *whole, [&](TrainingRanks& groups, Model& model) {
    model.allocate_gradients();
    Communicator &on = *groups.model().stages, &back = *groups.model().stages_back;
    const double before = on.bytes_sent(), before_back = back.bytes_sent();
    Executor(model).execute(plan_shard("dense", plan_request(batch, 64), 0, 1), batch, *loss);
    const double pass = 4.0 * 40 * static_cast<double>(config.hidden_size);
    EXPECT_EQ(on.bytes_sent() - before, model.stage().is_last() ? 0 : pass);
    EXPECT_EQ(back.bytes_sent() - before_back, model.stage().is_first() ? 0 : pass);
    const double executed = on.bytes_sent();
    sum_gradients(model, groups.data_parallel_group());
    const double embedding = 4.0 * static_cast<double>(config.vocab_size * config.hidden_size);
    const bool is_end = model.stage().is_first() || model.stage().is_last();
    EXPECT_EQ(on.bytes_sent() - executed, is_end ? embedding : 0);
  });
}

}  // namespace
}  // namespace bough

// Tests of tensor parallelism: losses, checkpoints, adapters, bytes sent. parallel_groups_test.cpp tests the
// gradients.
#include "models/tensor_parallel.h"

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "algo/loss.h"
#include "base/error.h"
#include "models/checkpoint.h"
#include "models/lora.h"
#include "train/gradient_step.h"
#include "train/optimizer.h"
#include "train/ranks_test_util.h"

namespace bough {
namespace {

// With four ranks, the policy's 9 most likely tokens and the log-probabilities of the batch's top-k tokens
// are those of one process. The gradient of a loss that reads top-k tokens (obrs) is the flat batch's.
TEST(TensorParallel, TopKTokensAreThoseOfTheWholeVocabulary) {
  const auto r = random_batch(11, 80);
  add_top_k_tokens(*r, 11);
  LossSettings settings;
  settings.teacher.path = "t";
  settings.teacher.topk = 5;
  settings.loss = "ppo";
  settings.correction = "obrs";
  const auto loss = make_loss(settings);
  const auto whole = random_model(shared_config(11), 11, at::kDouble);
  FlatResult flat = FlatReference(*whole).run(r->batch, *loss);
  const RowValues one = Executor(*whole).execute_forward(
      plan_shard("blocks", plan_request(r->batch, 24), 0, 1), r->batch, {.top_k = 9});
  on_rank_groups({.tensor = 4}, *whole, [&](TrainingRanks& groups, Model& model) {
    model.allocate_gradients();
    const Plan plan = plan_shard("blocks", plan_request(r->batch, 24), 0, 1);
    const RowValues values = Executor(model).execute_forward(plan, r->batch, {.top_k = 9});
    Executor(model).execute(plan, r->batch, *loss);
    sum_gradients(model, nullptr);
    const NamedTensors gradients = named_gradients(model);
    if (groups.all()->rank() != 2) return;
    EXPECT_TRUE(values.top_ids_RK.equal(one.top_ids_RK));
    EXPECT_LE((values.top_log_probs_RK - one.top_log_probs_RK).abs().max().item<double>(), 1e-10);
    EXPECT_LE((values.top_k_log_probs_RK - one.top_k_log_probs_RK).abs().max().item<double>(), 1e-10);
    EXPECT_LE(gradient_error(gradients, flat), 1e-10);
  });
}

// Optimizer steps on data-parallel and tensor-parallel ranks, compared with one process. Four ranks save the
// checkpoint, then two ranks and one rank load it.
TEST(TensorParallel, StepsAndCheckpointsAreOneProcesss) {
  const auto r = random_batch(4, 80);
  const auto loss = full_loss();
  const ModelConfig config = shared_config(4);
  const OptimizerSettings settings{.lr = 0.01, .weight_decay = 0.1, .gradient_clipping = 0.5};
  const auto folder =
      std::filesystem::temp_directory_path() / ("tensor_parallel_test_" + std::to_string(getpid()));
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
  on_rank_groups({.data = 2, .tensor = 2}, *start, [&](TrainingRanks& groups, Model& model) {
    const bool is_first = groups.all()->rank() == 0;
    Optimizer shared(model, settings, 20, groups.data_parallel_group());
    steps(model, shared, &groups, 0, 10);
    const OptimizerSnapshot snapshot = shared.snapshot(true);
    const NamedTensors weights = named_weights(model);
    if (is_first) {
      std::filesystem::create_directories(folder);
      snapshot.save(folder);
      write_safetensors(folder / "weights.safetensors", weights);
    }
    EXPECT_EQ(snapshot.tensors.empty(), !is_first);
    EXPECT_NEAR(steps(model, shared, &groups, 10, 20), norm, 1e-9 * norm);
    const NamedTensors last = named_weights(model);
    if (groups.all()->rank() == 3) expect_same(last);
  });
  const SafetensorsFile saved(folder / "weights.safetensors");
  for (const int64_t size : {1, 2}) {
    on_rank_groups({.tensor = size}, *start, [&](TrainingRanks& groups, Model& model) {
      for (Parameter* parameter : model.parameters())
        for (const auto& part : parameter->parts)
          parameter->part_value(part).copy_(own_piece(saved.tensor(part.name), *parameter, part));
      Optimizer shared(model, settings, 20, groups.data_parallel_group());
      shared.load(folder);
      steps(model, shared, nullptr, 10, 20);
      const NamedTensors last = named_weights(model);
      if (!groups.all() || groups.all()->rank() == 0) expect_same(last);
    });
  }
  std::filesystem::remove_all(folder);
}

// Adapters on frozen weights. Some adapter weights are copied to every rank, some are split.
TEST(TensorParallel, AdaptersHaveTheUnshardedModelsGradient) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto r = random_batch(seed, 80);
    const auto loss = full_loss();
    LoraSettings lora{.rank = 3};
    if (seed % 3 > 0) lora.targets.push_back({"lm_head"});
    const auto whole = random_model(shared_config(seed), seed, at::kDouble);
    const auto one = random_model(shared_config(seed), seed, at::kDouble);
    add_adapter(*one, lora, seed);
    fill_trained(*one);
    const auto request = plan_request(r->batch, 24);
    one->allocate_gradients();
    Executor(*one).execute(plan_shard("blocks", request, 0, 1), r->batch, *loss);
    std::map<std::string, at::Tensor> expected;
    for (const auto& [name, gradient] : named_gradients(*one)) expected[name] = gradient;
    const int64_t tensor = seed % 2 == 0 ? 2 : 4;
    on_rank_groups({.tensor = tensor}, *whole, [&](TrainingRanks& groups, Model& model) {
      add_adapter(model, lora, seed);
      NamedTensors sampled;
      for (const Parameter* parameter : model.trained_parameters())
        for (const auto& part : parameter->parts)
          sampled.emplace_back(
              part.name,
              gather_pieces(parameter->part_value(part), *parameter, part, *groups.tensor()).clone());
      fill_trained(model);
      model.allocate_gradients();
      Executor(model).execute(plan_shard("blocks", request, 0, 1), r->batch, *loss);
      sum_gradients(model, nullptr);
      const NamedTensors gradients = named_gradients(model);
      if (groups.all()->rank() > 0) return;
      expect_same_gradients(gradients, expected, seed);
      const auto fresh = random_model(shared_config(seed), seed, at::kDouble);
      add_adapter(*fresh, lora, seed);
      std::map<std::string, at::Tensor> of_one;
      for (const auto& [name, value] : adapter_tensors(*fresh)) of_one[name] = value;
      for (const auto& [name, value] : sampled) EXPECT_TRUE(value.equal(of_one.at(name))) << name;
    });
  }
}

// In a file, a fused tensor (q, k and v; gate and up; as in Phi-3) contains several parameters.
TEST(TensorParallel, FusedProjectionsAreCutAndPutTogether) {
  ModelConfig config = shared_config(5);
  config.fused_projections = true;
  const auto whole = random_model(config, 5, at::kDouble);
  on_rank_groups({.tensor = 4}, *whole, [&](TrainingRanks& groups, Model& model) {
    const NamedTensors together = named_weights(model);
    const auto copy = make_model(config, at::kDouble);
    gather_weights(model, groups.is_rank_zero() ? copy.get() : nullptr);
    if (!groups.is_rank_zero()) return;
    const NamedTensors expected = named_weights(*whole), gathered = named_weights(*copy);
    ASSERT_EQ(together.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(together[i].first, expected[i].first);
      // A tensor that several ranks hold contributes once to the gathered tensor, not once per rank.
      EXPECT_TRUE(together[i].second.equal(expected[i].second)) << expected[i].first;
      EXPECT_TRUE(gathered[i].second.equal(expected[i].second)) << expected[i].first;
    }
  });
}

// docs/ranks.md says what a pass sends.
TEST(TensorParallel, SendsThePredictedBytes) {
  ModelConfig config = shared_config(6);
  config.post_norms = false;
  config.pre_norms = true;
  const auto whole = random_model(config, 6, at::kFloat);
  const std::vector<Trajectory> rows_of_batch = {
      trajectory_of(std::vector<int32_t>(40, 3), std::vector<uint8_t>(40, 1))};
  TrainBatch batch = make_batch(rows_of_batch, {}, at::kFloat);
  batch.fields.advantages_R = at::ones({batch.num_rows()});
  const double tokens = 40, rows = static_cast<double>(batch.num_rows()),
               width = static_cast<double>(config.hidden_size),
               layers = static_cast<double>(config.num_layers);
  const auto loss = make_loss({.loss = "pg"});
  on_rank_groups({.tensor = 2}, *whole, [&](TrainingRanks& groups, Model& model) {
    model.allocate_gradients();
    const double before = groups.tensor()->bytes_sent();
    Executor(model).execute(plan_shard("dense", plan_request(batch, 64), 0, 1), batch, *loss);
    // On two ranks, an all-reduce of B bytes sends B bytes from each rank. So does an all-gather of B bytes
    // per rank.
    const double sums = 4 * (4 * layers * tokens * width + tokens * width + tokens * width);
    EXPECT_EQ(groups.tensor()->bytes_sent() - before, sums + 4 * 3 * rows);
  });
  on_rank_groups({.context = 2}, *whole, [&](TrainingRanks& groups, Model& model) {
    model.allocate_gradients();
    const double before = groups.context()->bytes_sent();
    Executor(model, {.context_ranks = groups.context()})
        .execute(plan_shard("dense", plan_request(batch, 64), 0, 1), batch, *loss);
    const double keys = 2 * static_cast<double>(config.key_width());
    // Per layer, the keys and values of this rank's half of the tokens are gathered, and their gradients are
    // summed over all tokens. Once per pass, hidden states are gathered, and the gradient of the head's
    // sources is summed.
    EXPECT_EQ(groups.context()->bytes_sent() - before,
              4 * (layers * (tokens / 2 * keys + tokens * keys) + tokens / 2 * width + tokens * width));
  });
}

TEST(TensorParallel, ModelsThatCannotBeSplitAreRefused) {
  ModelConfig config = random_config(0);
  config.num_heads = 6;
  config.num_kv_heads = 2;
  const auto message = [&](int64_t size) -> std::string {
    try {
      shard_config(config, 0, size);
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(2), "");
  EXPECT_NE(message(4).find("6 heads"), std::string::npos) << message(4);
  EXPECT_NE(message(3).find("2 key heads"), std::string::npos) << message(3);
  config.intermediate_size = 41;
  EXPECT_NE(message(2).find("width of 41"), std::string::npos) << message(2);
}

}  // namespace
}  // namespace bough

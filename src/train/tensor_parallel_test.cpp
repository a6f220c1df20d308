// What is particular to ranks that share a layer; their gradients: ranks_test.cpp.
#include "models/tensor_parallel.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "algo/loss.h"
#include "base/error.h"
#include "train/gradient_step.h"
#include "train/optimizer.h"
#include "train/ranks_test_util.h"

namespace bough {
namespace {

const bool one_thread = (at::set_num_threads(1), true);

// Losses that ask for other tokens than the drawn ones: the teacher's, the policy's most likely.
TEST(TensorParallel, GivenAndMostLikelyTokensAreTheWholeVocabularys) {
  const auto r = random_batch(11, 80);
  add_given_tokens(*r, 11);
  LossSettings settings;
  settings.teacher.path = "t";
  settings.teacher.topk = 5;
  settings.loss = "ppo";
  settings.correction = "obrs";
  const auto loss = make_loss(settings);
  const auto whole = random_model(shared_config(11), 11, at::kDouble);
  FlatResult flat = FlatReference(*whole).run(r->batch, *loss);
  const RowValues one =
      Executor(*whole).forward(plan_share("blocks", plan_request(r->batch, 24), 0, 1), r->batch, 9);
  on_rank_groups({.tensor = 4}, *whole, [&](TrainingRanks& groups, Model& model) {
    model.allocate_gradients();
    const Plan plan = plan_share("blocks", plan_request(r->batch, 24), 0, 1);
    const RowValues values = Executor(model).forward(plan, r->batch, 9);
    Executor(model).forward_backward(plan, r->batch, *loss);
    sum_gradients(model, nullptr);
    const NamedTensors gradients = named_gradients(model);
    if (groups.all()->rank() != 2) return;
    EXPECT_TRUE(values.top_ids_RK.equal(one.top_ids_RK));
    EXPECT_LE((values.top_log_probs_RK - one.top_log_probs_RK).abs().max().item<double>(), 1e-10);
    EXPECT_LE((values.given_log_probs_RK - one.given_log_probs_RK).abs().max().item<double>(), 1e-10);
    EXPECT_LE(gradient_error(gradients, flat), 1e-10);
  });
}

// Steps of the optimizer, shared by data and tensor ranks, against one process; what is saved by four ranks is
// loaded by two, and by one.
TEST(TensorParallel, StepsAndCheckpointsAreOneProcesss) {
  const auto r = random_batch(4, 80);
  const auto loss = full_loss();
  const ModelConfig config = shared_config(4);
  const OptimizerSettings settings{.lr = 0.01, .weight_decay = 0.1, .gradient_clipping = 0.5};
  const auto folder =
      std::filesystem::temp_directory_path() / ("tensor_parallel_test_" + std::to_string(getpid()));
  const auto steps = [&](Model& model, Optimizer& optimizer, Communicator* data, int64_t from, int64_t to) {
    double norm = 0;
    for (int64_t step = from; step < to; ++step) {
      const Plan plan =
          plan_share("blocks", plan_request(r->batch, 24), data ? data->rank() : 0, data ? data->size() : 1);
      Executor(model, {.ranks = data}).forward_backward(plan, r->batch, *loss);
      norm = optimizer.step().grad_norm;
    }
    optimizer.check_integrity();
    return norm;
  };
  const auto one = random_model(config, 4, at::kDouble);
  const auto start = random_model(config, 4, at::kDouble);
  Optimizer optimizer(*one, settings, 20);
  const double norm = steps(*one, optimizer, nullptr, 0, 20);
  const auto expect_same = [&](const NamedTensors& weights) {
    const NamedTensors expected = named_weights(*one);
    ASSERT_EQ(weights.size(), expected.size());
    for (size_t i = 0; i < weights.size(); ++i) {
      EXPECT_EQ(weights[i].first, expected[i].first);
      EXPECT_LE((weights[i].second - expected[i].second).abs().max().item<double>(), 1e-9)
          << weights[i].first;
    }
  };
  on_rank_groups({.data = 2, .tensor = 2}, *start, [&](TrainingRanks& groups, Model& model) {
    const bool is_first = groups.all()->rank() == 0;
    Optimizer shared(model, settings, 20, groups.sharing());
    steps(model, shared, groups.sharing(), 0, 10);
    const OptimizerSnapshot snapshot = shared.snapshot(true);
    const NamedTensors weights = named_weights(model);
    if (is_first) {
      std::filesystem::create_directories(folder);
      snapshot.save(folder);
      write_safetensors(folder / "weights.safetensors", weights);
    }
    EXPECT_EQ(snapshot.tensors.empty(), !is_first);
    EXPECT_NEAR(steps(model, shared, groups.sharing(), 10, 20), norm, 1e-9 * norm);
    const NamedTensors last = named_weights(model);
    if (groups.all()->rank() == 3) expect_same(last);
  });
  const SafetensorsFile saved(folder / "weights.safetensors");
  for (const int64_t size : {1, 2}) {
    on_rank_groups({.tensor = size}, *start, [&](TrainingRanks& groups, Model& model) {
      for (Parameter* parameter : model.parameters())
        for (const auto& part : parameter->parts)
          parameter->part_value(part).copy_(own_piece(saved.tensor(part.name), *parameter, part));
      Optimizer shared(model, settings, 20, groups.sharing());
      shared.load(folder);
      steps(model, shared, nullptr, 10, 20);
      const NamedTensors last = named_weights(model);
      if (!groups.all() || groups.all()->rank() == 0) expect_same(last);
    });
  }
  std::filesystem::remove_all(folder);
}

TEST(TensorParallel, WhatCannotBeSharedIsRefused) {
  ModelConfig config = random_config(0);
  config.num_heads = 6;
  config.num_kv_heads = 2;
  config.qk_norm_over_width = false;
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
  config.qk_norm_over_width = true;
  EXPECT_NE(message(2).find("norms over all heads"), std::string::npos) << message(2);
  config.intermediate_size = 41;
  EXPECT_NE(message(2).find("width of 41"), std::string::npos) << message(2);
}

}  // namespace
}  // namespace bough

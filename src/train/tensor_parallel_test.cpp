// Tensor parallelism against the flat batch: threads of this process, each with its pieces of the model.
#include "models/tensor_parallel.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <thread>

#include "algo/loss.h"
#include "base/error.h"
#include "models/checkpoint.h"
#include "train/exactness.h"
#include "train/gradient_step.h"
#include "train/optimizer.h"
#include "train/ranks.h"

namespace bough {
namespace {

const bool one_thread = (at::set_num_threads(1), true);

// Heads and widths that four ranks can share; key heads fewer than they, now and then.
ModelConfig shared_config(uint64_t seed) {
  ModelConfig config = random_config(seed);
  config.num_kv_heads = int64_t{1} << (seed % 3);
  config.num_heads = std::max<int64_t>(4, config.num_kv_heads) * (1 + static_cast<int64_t>(seed % 2));
  config.qk_norm_over_width = false;
  return config;
}

// A rank's place: of `size` ranks `tensor` share a replica, adjacent ones.
struct Groups {
  Groups(Communicator& all, int64_t tensor_size)
      : tensor(all.split(all.rank() / tensor_size)), data(all.split(all.rank() % tensor_size)) {
    tensor->set_deadline(60);
    data->set_deadline(60);
  }
  std::unique_ptr<Communicator> tensor, data;
};

// `work(all, groups, own model)` on so many threads. The whole model is read by all.
template <class Work>
void on_ranks(int64_t size, int64_t tensor_size, Model& whole, const Work& work) {
  auto ranks = thread_communicators(size);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      Communicator& all = *ranks[static_cast<size_t>(rank)];
      all.set_deadline(60);
      Groups groups(all, tensor_size);
      auto own = make_model(whole.config(), whole.dtype(), at::kCPU, groups.tensor.get());
      std::map<std::string, at::Tensor> weights;
      for (const auto& [name, weight] : named_weights(whole)) weights[name] = weight;
      for (Parameter* parameter : own->parameters())
        for (const auto& part : parameter->parts)
          parameter->part_value(part).copy_(own_piece(weights.at(part.name), *parameter, part));
      work(all, groups, *own);
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(TensorParallel, HasTheFlatBatchsGradient) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const auto r = random_batch(seed, 80);
    add_given_tokens(*r, seed);
    LossSettings settings;
    settings.loss = seed % 4 == 0 ? "gspo" : "ppo";
    settings.entropy_coef = 0.1;
    settings.kl_loss_coef = 0.05;
    const auto loss = make_loss(settings);
    const auto whole = random_model(shared_config(seed), seed, at::kDouble);
    FlatResult flat = FlatReference(*whole).run(r->batch, *loss);
    const int64_t tensor = seed % 2 == 0 ? 2 : 4, size = tensor * (seed % 3 == 0 ? 2 : 1);
    double worst = 0, loss_error = 0, value_error = 0;
    on_ranks(size, tensor, *whole, [&](Communicator& all, Groups& groups, Model& model) {
      model.allocate_gradients();
      const Plan plan = plan_share(seed % 5 == 0 ? "path" : "blocks", plan_request(r->batch, 24),
                                   groups.data->rank(), groups.data->size());
      const WalkResult walk =
          Executor(model, {.head_chunk_rows = 7, .verify_recompute = true, .ranks = groups.data.get()})
              .forward_backward(plan, r->batch, *loss);
      sum_gradients(model, groups.data.get());
      const NamedTensors gradients = named_gradients(model);
      if (all.rank() != size - 1) return;
      worst = gradient_error(gradients, flat);
      loss_error = std::abs(walk.loss - flat.loss);
      if (r->batch.num_rows() > 0)
        value_error = std::max((walk.values.log_probs_R - flat.log_probs_R).abs().max().item<double>(),
                               (walk.values.entropies_R - flat.entropies_R).abs().max().item<double>());
    });
    ASSERT_LE(worst, 1e-10) << "seed " << seed << ", " << size << " ranks, " << tensor << " a replica";
    ASSERT_LE(loss_error, 1e-10 * std::max(1.0, std::abs(flat.loss))) << seed;
    ASSERT_LE(value_error, 1e-10) << seed;
  }
}

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
  const RowValues one = Executor(*whole).forward(plan_share("blocks", plan_request(r->batch, 24), 0, 1), r->batch, 9);
  on_ranks(4, 4, *whole, [&](Communicator& all, Groups&, Model& model) {
    model.allocate_gradients();
    const Plan plan = plan_share("blocks", plan_request(r->batch, 24), 0, 1);
    const RowValues values = Executor(model).forward(plan, r->batch, 9);
    Executor(model).forward_backward(plan, r->batch, *loss);
    sum_gradients(model, nullptr);
    const NamedTensors gradients = named_gradients(model);
    if (all.rank() != 2) return;
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
  const auto folder = std::filesystem::temp_directory_path() / ("tensor_parallel_test_" + std::to_string(getpid()));
  const auto steps = [&](Model& model, Optimizer& optimizer, Communicator* data, int64_t from, int64_t to) {
    double norm = 0;
    for (int64_t step = from; step < to; ++step) {
      const Plan plan = plan_share("blocks", plan_request(r->batch, 24), data ? data->rank() : 0, data ? data->size() : 1);
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
      EXPECT_LE((weights[i].second - expected[i].second).abs().max().item<double>(), 1e-9) << weights[i].first;
    }
  };
  on_ranks(4, 2, *start, [&](Communicator& all, Groups& groups, Model& model) {
    Optimizer shared(model, settings, 20, groups.data.get());
    steps(model, shared, groups.data.get(), 0, 10);
    const OptimizerSnapshot snapshot = shared.snapshot(true);
    const NamedTensors weights = named_weights(model);
    if (all.rank() == 0) {
      std::filesystem::create_directories(folder);
      snapshot.save(folder);
      write_safetensors(folder / "weights.safetensors", weights);
    }
    EXPECT_EQ(snapshot.tensors.empty(), all.rank() != 0);
    EXPECT_NEAR(steps(model, shared, groups.data.get(), 10, 20), norm, 1e-9 * norm);
    const NamedTensors last = named_weights(model);
    if (all.rank() == 3) expect_same(last);
  });
  const SafetensorsFile saved(folder / "weights.safetensors");
  for (const int64_t size : {1, 2}) {
    on_ranks(size, size, *start, [&](Communicator& all, Groups& groups, Model& model) {
      for (Parameter* parameter : model.parameters())
        for (const auto& part : parameter->parts)
          parameter->part_value(part).copy_(own_piece(saved.tensor(part.name), *parameter, part));
      Optimizer shared(model, settings, 20, groups.data.get());
      shared.load(folder);
      steps(model, shared, nullptr, 10, 20);
      const NamedTensors last = named_weights(model);
      if (all.rank() == 0) expect_same(last);
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

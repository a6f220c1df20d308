// Ranks as threads of this process, each with its shard of a model. For tests only.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "models/checkpoint.h"
#include "models/tensor_parallel.h"
#include "train/optimizer.h"
#include "train/parallel_groups.h"
#include "train/reference_comparison.h"

namespace bough {

// A configuration that four ranks can shard. For some seeds it has fewer key/value heads than ranks.
inline ModelConfig shared_config(uint64_t seed) {
  ModelConfig config = random_config(seed);
  config.num_kv_heads = int64_t{1} << (seed % 3);
  config.num_heads = std::max<int64_t>(4, config.num_kv_heads) * (1 + static_cast<int64_t>(seed % 2));
  return config;
}

// Tensor and context parallelism, alone and combined, without pipelines.
inline const std::vector<ParallelSizes> kSharedPasses = {{.tensor = 2},
                                                         {.context = 2},
                                                         {.tensor = 4},
                                                         {.context = 4},
                                                         {.data = 2, .tensor = 2},
                                                         {.data = 2, .context = 2},
                                                         {.context = 2, .tensor = 2},
                                                         {.data = 2, .context = 2, .tensor = 2}};

// Pipelines, alone and combined with other kinds of parallelism.
inline const std::vector<ParallelSizes> kPipelines = {{.pipeline = 2},
                                                      {.pipeline = 3},
                                                      {.pipeline = 4},
                                                      {.data = 2, .pipeline = 2},
                                                      {.tensor = 2, .pipeline = 2},
                                                      {.context = 2, .pipeline = 2},
                                                      {.context = 2, .pipeline = 3}};

// A configuration with one layer per stage or more.
inline ModelConfig staged_config(uint64_t seed, int64_t num_stages) {
  ModelConfig config = shared_config(seed);
  config.num_layers = std::max(config.num_layers, num_stages + static_cast<int64_t>(seed % 2));
  if (!config.layer_ropes.empty())
    config.layer_ropes.resize(static_cast<size_t>(config.num_layers), LayerRope::kLocal);
  return config;
}

// Takes `count` optimizer steps on one batch and returns the last gradient norm. groups: the ranks that
// train together, or nullptr if this process trains alone.
inline double take_steps(Model& model, Optimizer& optimizer, const TrainingRanks* groups,
                         const TrainBatch& batch, const Loss& loss, int64_t count) {
  double norm = 0;
  for (int64_t step = 0; step < count; ++step) {
    const Plan plan = plan_shard("blocks", plan_request(batch, 24), groups ? groups->replica() : 0,
                                 groups ? groups->num_replicas() : 1);
    Executor(model, {.ranks = groups ? groups->loss_group() : nullptr}).execute(plan, batch, loss);
    norm = optimizer.step().grad_norm;
  }
  optimizer.check_integrity();
  return norm;
}

inline void expect_same_weights(const NamedTensors& weights, const NamedTensors& expected) {
  ASSERT_EQ(weights.size(), expected.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    EXPECT_EQ(weights[i].first, expected[i].first);
    EXPECT_LE((weights[i].second - expected[i].second).abs().max().item<double>(), 1e-9) << weights[i].first;
  }
}

// Sets trained parameters to random values that do not depend on the sharding. An adapter's B starts at 0,
// which would hide A's gradient.
inline void fill_trained(Model& model) {
  for (Parameter* parameter : model.trained_parameters())
    for (const auto& part : parameter->parts) {
      auto generator = at::detail::createCPUGenerator(std::hash<std::string>()(part.name));
      const at::Tensor whole =
          at::randn(unsharded_sizes(*parameter, part), generator, at::TensorOptions().dtype(at::kDouble));
      parameter->part_value(part).copy_(own_piece(whole, *parameter, part)).mul_(0.3);
    }
}

// Each gradient's error must be at most 1e-10 of the largest gradient's norm.
inline void expect_same_gradients(const NamedTensors& gradients,
                                  const std::map<std::string, at::Tensor>& expected, uint64_t seed) {
  EXPECT_EQ(gradients.size(), expected.size());
  double largest = 0;
  for (const auto& [name, gradient] : gradients) largest = std::max(largest, gradient.norm().item<double>());
  for (const auto& [name, gradient] : gradients)
    EXPECT_LE((gradient - expected.at(name)).norm().item<double>(), 1e-10 * largest)
        << name << ", seed " << seed;
}

// Runs work(groups, sharded model) on sizes.all() threads, one per rank. All threads read `whole`.
template <class Work>
void on_rank_groups(const ParallelSizes& sizes, Model& whole, const Work& work) {
  auto ranks = thread_communicators(sizes.all());
  std::map<std::string, at::Tensor> weights;
  for (const auto& [name, weight] : named_weights(whole)) weights[name] = weight;
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < sizes.all(); ++rank)
    threads.emplace_back([&, rank] {
      Communicator& all = *ranks[static_cast<size_t>(rank)];
      all.set_deadline(60);
      TrainingRanks groups(&all, sizes);
      groups.set_deadline(60);
      auto own = make_model(whole.config(), whole.dtype(), at::kCPU, groups.model());
      for (Parameter* parameter : own->parameters())
        for (const auto& part : parameter->parts)
          parameter->part_value(part).copy_(own_piece(weights.at(part.name), *parameter, part));
      work(groups, *own);
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace bough

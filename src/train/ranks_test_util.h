// Ranks as threads of this process, each with its pieces of a model. For tests only.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "models/checkpoint.h"
#include "models/tensor_parallel.h"
#include "train/exactness.h"
#include "train/ranks.h"

namespace bough {

// Heads and widths that four ranks can share; key heads fewer than they, now and then.
inline ModelConfig shared_config(uint64_t seed) {
  ModelConfig config = random_config(seed);
  config.num_kv_heads = int64_t{1} << (seed % 3);
  config.num_heads = std::max<int64_t>(4, config.num_kv_heads) * (1 + static_cast<int64_t>(seed % 2));
  return config;
}

// `work(groups, own model)` on so many threads. The whole model is read by all.
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

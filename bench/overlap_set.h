// The synthetic sets of the paper Tree Training (papers/tree-training.txt, section 3.1), as a rollout file
// for all commands.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "base/settings.h"
#include "data/trajectory.h"
#include "paper_sets.h"

namespace bough_bench {

struct OverlapSettings {
  std::string out;
  double por = 0.5;
  int64_t leaves = 128;
  double mean_length = 4000;
  double sigma = 0.25;
  int64_t vocab = 4096;
  int64_t seed = 1;

  template <class V>
  void visit(V& v) {
    v("out", out, "the rollout file to write, .jsonl or .jsonl.zst; empty: only print the statistics");
    v("por", por, "potential overlap ratio: 1 - tree tokens / tokens", bough::range(0, 0.99));
    v("leaves", leaves, "number of sequences; none is a prefix of another", bough::range(1, 100'000));
    v("mean_length", mean_length, "mean tokens per sequence", bough::range(2, 1e6));
    v("sigma", sigma, "standard deviation of the logarithm of lengths", bough::range(0, 2));
    v("vocab", vocab, "vocabulary size; all token ids are below",
      bough::range(100, std::numeric_limits<int32_t>::max()));
    v("seed", seed, "seeds all random numbers; the lengths do not depend on por", bough::range(0, 1e15));
  }
};

// All tokens except a sequence's first are trained. Each sequence has a random advantage in [-1, 1), each
// token the log-probability of a uniform distribution.
inline std::vector<bough::Trajectory> overlap_rollouts(const OverlapSettings& settings) {
  const Batch batch = with_overlap(settings.por, static_cast<int>(settings.leaves), settings.mean_length,
                                   settings.sigma, static_cast<uint64_t>(settings.seed), settings.vocab);
  Random random(static_cast<uint64_t>(settings.seed) + 1);
  std::vector<bough::Trajectory> rollouts;
  for (const Sequence& sequence : batch) {
    bough::Trajectory& rollout = rollouts.emplace_back();
    rollout.group = "0";
    rollout.input_ids = sequence;
    rollout.loss_mask.assign(sequence.size(), 1);
    rollout.logprobs.assign(sequence.size(), -std::log(static_cast<float>(settings.vocab)));
    rollout.loss_mask[0] = 0;
    rollout.logprobs[0] = 0;
    rollout.advantage = {static_cast<float>(2 * random.uniform() - 1)};
  }
  return rollouts;
}

}  // namespace bough_bench

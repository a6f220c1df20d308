// Synthetic trajectory sets with the shapes that papers on tree training measure. The shapes follow published
// numbers: lengths, samples per prompt, compression. Tokens are random; a set depends only on its seed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace bough_bench {

using Sequence = std::vector<int32_t>;
using Batch = std::vector<Sequence>;

class Random {
 public:
  // Token ids are in [5, vocab).
  explicit Random(uint64_t seed, int64_t vocab = 150'005) : engine(seed), vocab_(vocab) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine() % static_cast<uint64_t>(n)); }
  double uniform() { return (static_cast<double>(engine() >> 11) + 0.5) * 0x1p-53; }
  // A log-normal length, at least 2. Lengths of model outputs are similar: many short ones and a long tail.
  int64_t around(double mean, double sigma) {
    const double normal = std::sqrt(-2 * std::log(uniform())) * std::cos(2 * M_PI * uniform());
    return std::max<int64_t>(2, std::lround(mean * std::exp(sigma * normal - sigma * sigma / 2)));
  }
  void append(Sequence& to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to.push_back(static_cast<int32_t>(5 + below(vocab_ - 5)));
  }
  Sequence tokens(int64_t count) {
    Sequence result;
    append(result, count);
    return result;
  }
  void shuffle(Batch& batch) {
    for (size_t i = batch.size(); i > 1; --i) std::swap(batch[i - 1], batch[below(static_cast<int64_t>(i))]);
  }

  std::mt19937_64 engine;

 private:
  int64_t vocab_;
};

// tau2-bench's airline tasks as AReaL trains on them: 30 tasks, 8 trajectories each, contexts of 16K. Every
// call of the model is a sequence, and all sequences share the system prompt (policy and tools).
// A turn lasts from one user message to the next. In a turn, each call extends the call before: thought, tool
// call, tool result. At the next user message, the chat template drops the turn's thoughts. The turn is then
// a branch that leaves the history where its first thought began.
// The means below are chosen to reproduce AReaL-DTA's Table 3 (leaves without the system prompt: 1.6K tokens,
// C = 1.42) and Figure 1 (with the system prompt: C = 5.56; with the calls inside turns: C = 9.43).
struct Tau2Shape {
  int64_t system_prompt = 4770;
  int tasks = 30, samples = 8;
  double turns = 5, calls = 1.69;  // per trajectory, per turn
  double first_message = 60, message = 75, thought = 430, visible = 85, result = 85;
  int64_t context = 16'384;
};

inline Batch tau2(const Tau2Shape& shape = {}) {
  Random random(1);
  Batch batch;
  const auto system = random.tokens(shape.system_prompt);
  for (int task = 0; task < shape.tasks; ++task) {
    const auto first = random.tokens(random.around(shape.first_message, 0.4));
    for (int sample = 0; sample < shape.samples; ++sample) {
      auto history = system;
      const int64_t turns = random.around(shape.turns, 0.35);
      for (int64_t turn = 0; turn < turns; ++turn) {
        if (turn == 0) history.insert(history.end(), first.begin(), first.end());
        else random.append(history, random.around(shape.message, 0.5));
        auto context = history;
        for (bool calls_tool = true; calls_tool;) {
          calls_tool = random.uniform() < 1 - 1 / shape.calls;
          random.append(context, random.around(shape.thought, 0.6));
          const auto visible = random.tokens(random.around(shape.visible, 0.5));
          const auto result = calls_tool ? random.tokens(random.around(shape.result, 0.5)) : Sequence{};
          context.insert(context.end(), visible.begin(), visible.end());
          if (static_cast<int64_t>(context.size()) > shape.context) break;
          batch.push_back(context);
          for (auto* to : {&context, &history}) {
            if (to == &history) to->insert(to->end(), visible.begin(), visible.end());
            to->insert(to->end(), result.begin(), result.end());
          }
        }
      }
    }
  }
  random.shuffle(batch);
  return batch;
}

// Groups of samples, one group per prompt, as in training on GSM8K and AIME.
inline Batch group(int prompts, int samples, double prompt, double answer, double sigma, int64_t context) {
  Random random(2);
  Batch batch;
  for (int p = 0; p < prompts; ++p) {
    const auto head = random.tokens(random.around(prompt, 0.25));
    for (int s = 0; s < samples; ++s) {
      batch.push_back(head);
      const int64_t length = random.around(answer, sigma);
      random.append(batch.back(), std::min<int64_t>(length, context - static_cast<int64_t>(head.size())));
    }
  }
  random.shuffle(batch);
  return batch;
}

// The synthetic sets of the paper Tree Training: a given potential overlap ratio, with the same number of
// leaves and of tokens for every ratio. Each sequence forks an older one at the fraction u^(1/theta) of their
// common length. The seed gives lengths, forked sequences and u. theta is searched so that the ratio is met.
inline Batch with_overlap(double potential_overlap_ratio, int num_leaves, double mean_length, double sigma,
                          uint64_t seed, int64_t vocab = 150'005) {
  Random random(seed, vocab);
  struct Fork {
    int64_t length, base;
    double u;
  };
  std::vector<int64_t> lengths;
  for (int i = 0; i < num_leaves; ++i) lengths.push_back(random.around(mean_length, sigma));
  std::sort(lengths.rbegin(), lengths.rend());  // longest first, so that a fork never exceeds its base
  std::vector<Fork> forks;
  int64_t num_tokens = 0;
  for (int i = 0; i < num_leaves; ++i) {
    forks.push_back({lengths[i], i > 0 ? random.below(i) : -1, random.uniform()});
    num_tokens += lengths[i];
  }
  const auto shared = [&](const Fork& fork, double theta) -> int64_t {
    if (fork.base < 0) return 0;
    const auto common = static_cast<double>(std::min(fork.length, forks[fork.base].length) - 1);
    return static_cast<int64_t>(common * std::pow(fork.u, 1 / theta));
  };
  double low = 1e-3, high = 1e6;
  for (int step = 0; step < 100; ++step) {
    const double theta = std::sqrt(low * high);
    int64_t saved = 0;
    for (const auto& fork : forks) saved += shared(fork, theta);
    (static_cast<double>(saved) < potential_overlap_ratio * static_cast<double>(num_tokens) ? low : high) =
        theta;
  }
  Batch batch;
  for (const auto& fork : forks) {
    Sequence sequence;
    if (fork.base >= 0)
      sequence.assign(batch[fork.base].begin(), batch[fork.base].begin() + shared(fork, high));
    random.append(sequence, fork.length - static_cast<int64_t>(sequence.size()));
    batch.push_back(std::move(sequence));
  }
  random.shuffle(batch);
  return batch;
}

}  // namespace bough_bench

// Times building a batch's prefix tree, its packing, its load balance and its plans (which build their own
// tree) on one core.
//
//   build/bench/tree_build [largest number of tokens, default 10000000 [word of the shapes to run]]
//
// Prints CPU time: the median and the best of several builds. The shapes are those of training batches:
//   group       prompts with 16 samples each
//   agentic     conversations that fork older ones at a turn and train every turn's own prefix
//   flat        nothing shared
//   varied      nothing shared, with many different lengths, so that packing is not trivial
//   nested      every prefix of one sequence
//   shortN      1 M tokens in sequences of N, in groups of 16
//   shortflatN  1 M tokens in sequences of N, nothing shared
// Sequences are shuffled, as from a replay buffer. `auto B` prices its candidates with the built-in profile
// of an H100 and the shape "small". "tight" uses the smallest memory that any plan fits.
//
// From 10 M to 100 M tokens, the time grows by a factor of 12 to 15 on already mapped memory. Reasons: each
// token's 24 bytes and the compared prefixes no longer fit the cache, and sorting S sequences takes S log S
// steps (12.4 times as many). On fresh memory the kernel also clears 2.4 GB, which is not part of the
// algorithm.
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "cost/cost_model.h"
#include "plan/dta_schedule.h"
#include "plan/load_balance.h"
#include "plan/packing.h"
#include "plan/plan.h"
#include "tree/prefix_tree.h"

namespace {

using bough::TokenSpan;
using Batch = std::vector<std::vector<int32_t>>;

struct Random {
  std::mt19937_64 engine{1};
  int64_t below(int64_t n) { return static_cast<int64_t>(engine() % static_cast<uint64_t>(n)); }
  int64_t around(int64_t mean) {
    return std::max<int64_t>(
        4, std::lround(std::normal_distribution<double>(double(mean), double(mean) / 4)(engine)));
  }
  void append(std::vector<int32_t>& to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to.push_back(static_cast<int32_t>(5 + below(32000)));
  }
};

Batch group(int64_t num_tokens, int64_t prompt, int64_t samples, int64_t response) {
  Random random;
  Batch batch;
  for (int64_t tokens = 0; tokens < num_tokens;) {
    std::vector<int32_t> head;
    random.append(head, prompt);
    for (int64_t i = 0; i < samples; ++i) {
      batch.push_back(head);
      random.append(batch.back(), random.around(response));
      tokens += static_cast<int64_t>(batch.back().size());
    }
  }
  return batch;
}

Batch agentic(int64_t num_tokens, int64_t prompt, int64_t rollouts, int64_t turns, int64_t turn_length) {
  Random random;
  Batch batch;
  for (int64_t tokens = 0; tokens < num_tokens;) {
    std::vector<int32_t> head;
    random.append(head, prompt);
    std::vector<Batch> conversations;
    for (int64_t i = 0; i < rollouts; ++i) {
      Batch conversation;
      if (!conversations.empty() && random.below(100) < 70) {
        const auto& base = conversations[random.below(static_cast<int64_t>(conversations.size()))];
        conversation.assign(base.begin(), base.begin() + random.below(static_cast<int64_t>(base.size())));
      }
      while (static_cast<int64_t>(conversation.size()) < turns)
        random.append(conversation.emplace_back(), random.around(turn_length));
      auto sequence = head;
      for (const auto& turn : conversation) {
        sequence.insert(sequence.end(), turn.begin(), turn.end());
        batch.push_back(sequence);
        tokens += static_cast<int64_t>(sequence.size());
      }
      conversations.push_back(std::move(conversation));
    }
  }
  return batch;
}

Batch nested(int64_t num_tokens) {
  Random random;
  std::vector<int32_t> longest;
  random.append(longest, static_cast<int64_t>(std::sqrt(2.0 * static_cast<double>(num_tokens))));
  Batch batch;
  for (size_t n = 1; n <= longest.size(); ++n) batch.emplace_back(longest.begin(), longest.begin() + n);
  return batch;
}

double cpu_milliseconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

struct Timing {
  double median_ms, best_ms;
};

Timing measure(const std::function<void()>& work, int repeat) {
  std::vector<double> times;
  for (int i = 0; i < repeat; ++i) {
    const double begin = cpu_milliseconds();
    work();
    times.push_back(cpu_milliseconds() - begin);
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times[0]};
}

// The smallest memory in which the batch can be planned, parsed from the error for a smaller budget.
int64_t smallest_budget(bough::PlanRequest request) {
  request.memory_bytes = 1;
  try {
    bough::make_plan("auto", request);
  } catch (const bough::UserError& error) {
    const std::string text = error.what(), before = "the smallest budget that fits is ";
    return std::atoll(text.c_str() + text.find(before) + before.size());
  }
  return 1;
}

struct Report {
  Batch batch;
  std::string shape;
  std::vector<TokenSpan> spans = {};
  bough::TreeStatistics statistics = {};

  Report(std::string shape, Batch batch) : batch(std::move(batch)), shape(std::move(shape)) {
    Random random;
    std::shuffle(this->batch.begin(), this->batch.end(), random.engine);
    spans.assign(this->batch.begin(), this->batch.end());
    statistics = bough::compute_statistics(bough::build_prefix_tree(spans));
  }

  void row(const std::string& what, const std::function<void()>& work) const {
    const auto timing = measure(work, statistics.num_flat_tokens > 20'000'000 ? 3 : 9);
    std::printf("%-10s %9ld tokens %9ld in the tree %7ld sequences  %-16s median %8.2f ms  best %8.2f ms\n",
                shape.c_str(), statistics.num_flat_tokens, statistics.num_tree_tokens,
                statistics.num_sequences, what.c_str(), timing.median_ms, timing.best_ms);
    std::fflush(stdout);
  }

  void builders() const {
    row("prefix tree", [&] { bough::build_prefix_tree(spans); });
    if (statistics.num_flat_tokens > 3'000'000) return;
    const auto tree = bough::build_prefix_tree(spans);
    const int64_t capacity = std::max<int64_t>(8192, statistics.longest_path);
    row("pack", [&] { bough::pack(tree, capacity); });
    row("first fit", [&] { bough::pack_first_fit_decreasing(tree, capacity); });
    row("balance", [&] { bough::balance_load(tree, 8, {1, 1e-4}); });
    row("dta schedule", [&] { bough::simulate_dta(tree, {.block_size = 2048}); });
    bough::PlanRequest request;
    request.sequences = spans;
    request.max_tokens_per_pass = capacity;
    for (const char* strategy : {"dense", "packed", "path", "blocks"})
      row(strategy, [&] { bough::make_plan(strategy, request); });
  }

  void choices(const std::vector<int64_t>& sizes) const {
    if (statistics.num_flat_tokens > 3'000'000) return;
    const bough::CostModel costs(bough::built_in_profile("h100", "bf16"),
                                 bough::named_model_shape("small", "bf16"));
    bough::PlanRequest request;
    request.sequences = spans;
    request.costs = &costs;
    for (const int64_t size : sizes) {
      const std::string name = "auto " + std::to_string(size);
      request.max_tokens_per_pass = size;
      request.memory_bytes.reset();
      row(name, [&] { bough::make_plan("auto", request); });
      request.memory_bytes = smallest_budget(request);
      row(name + " tight", [&] { bough::make_plan("auto", request); });
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  const int64_t largest = argc > 1 ? std::atoll(argv[1]) : 10'000'000;
  const std::string word = argc > 2 ? argv[2] : "";
  const auto report = [&](const std::string& shape, const std::function<Batch()>& make,
                          bool is_short = false) {
    if (shape.find(word) == std::string::npos) return;
    const Report rows(shape, make());
    if (is_short) {
      rows.choices({256, 1024});
      return;
    }
    rows.builders();
    rows.choices({256, 1024, 4096, 16384});
  };
  for (int64_t tokens = 1'000'000; tokens <= largest; tokens *= 10) {
    report("group", [&] { return group(tokens, 512, 16, 256); });
    report("agentic", [&] { return agentic(tokens, 512, 16, 16, 128); });
    report("flat", [&] { return group(tokens, 244, 1, 1); });
    report("varied", [&] { return group(tokens, 4, 1, 240); });
    report("nested", [&] { return nested(tokens); });
  }
  if (largest >= 1'000'000)
    for (const int64_t length : {64, 32, 16, 8}) {  // 16 K to 128 K sequences
      const auto name = [&](const char* kind) { return kind + std::to_string(length); };
      report(
          name("short"), [&] { return group(1'000'000, length / 2, 16, length / 2); }, true);
      report(
          name("shortflat"), [&] { return group(1'000'000, 4, 1, length - 4); }, true);
    }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::printf("peak resident memory %.2f GiB, the batches included\n", double(usage.ru_maxrss) / (1 << 20));
}

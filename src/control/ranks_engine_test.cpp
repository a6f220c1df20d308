// Engines of several ranks, threads here, against one.
#include "control/ranks_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <thread>

#include "rollout/rollout_test_util.h"

namespace bough {
namespace {

struct RankOfEngine {
  std::unique_ptr<Model> model = small_model(at::kDouble, 3);
  EmbeddedEngine engine{*model, engine_options(/*max_running=*/4)};
  SharedWeights weights{model.get()};
};

// `drive` has rank 0's engine; all ranks have published version 1. Returns what each rank drew.
std::vector<int64_t> on_ranks(int64_t num_ranks, const std::function<void(RanksEngine&)>& drive) {
  auto ranks = thread_communicators(num_ranks);
  std::vector<RankOfEngine> parts(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (size_t rank = 1; rank < ranks.size(); ++rank)
    threads.emplace_back([&, rank] {
      parts[rank].weights.publish(1);
      serve_engine(parts[rank].engine, parts[rank].weights, *ranks[rank]);
    });
  {
    RanksEngine engine(parts[0].engine, parts[0].model->config(), *ranks[0]);
    engine.update_weights({.version = 1, .model = parts[0].model.get()});
    drive(engine);
    engine.end();
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<int64_t> drawn;
  for (const RankOfEngine& part : parts) {
    part.engine.check_integrity();
    drawn.push_back(part.engine.statistics().new_tokens);
  }
  return drawn;
}

std::vector<GenerationResult> alone() {
  RankOfEngine one;
  return one.engine.generate(mixed_requests());
}

void expect_same(const std::vector<GenerationResult>& expected, const std::vector<GenerationResult>& got) {
  ASSERT_EQ(expected.size(), got.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(got[i].id, expected[i].id);
    EXPECT_EQ(got[i].prompt_ids, expected[i].prompt_ids);
    ASSERT_EQ(got[i].samples.size(), expected[i].samples.size());
    for (size_t s = 0; s < expected[i].samples.size(); ++s) {
      const GeneratedSample& sample = got[i].samples[s];
      EXPECT_EQ(sample.token_ids, expected[i].samples[s].token_ids) << "request " << i;
      EXPECT_EQ(sample.versions, std::vector<int32_t>(sample.token_ids.size(), 1));
      for (size_t t = 0; t < sample.logprobs.size(); ++t)
        EXPECT_NEAR(sample.logprobs[t], expected[i].samples[s].logprobs[t], 1e-10);
    }
  }
}

TEST(RanksEngine, DrawsWhatOneEngineDrawsEachRankAShare) {
  const auto expected = alone();
  for (const int64_t num_ranks : {1, 2, 3}) {
    const auto drawn = on_ranks(num_ranks, [&](RanksEngine& engine) {
      expect_same(expected, engine.generate(mixed_requests()));
      int64_t tokens = 0;
      for (const GenerationResult& result : expected)
        for (const GeneratedSample& sample : result.samples) tokens += std::ssize(sample.token_ids);
      EXPECT_EQ(engine.statistics().new_tokens, tokens);
    });
    for (const int64_t tokens : drawn) EXPECT_GT(tokens, 0) << "a rank of " << num_ranks << " drew nothing";
  }
}

TEST(RanksEngine, WhatRunsCanBeSavedCancelledAndPutAside) {
  const auto expected = alone();
  on_ranks(3, [&](RanksEngine& engine) {
    for (GenerationRequest& request : mixed_requests()) engine.submit(std::move(request));
    std::map<uint64_t, GenerationResult> finished;
    const auto collect = [&](std::vector<GenerationResult> results) {
      for (GenerationResult& result : results) finished[result.id] = std::move(result);
    };
    collect(engine.step());
    // What runs on every rank can be saved, and goes on elsewhere.
    const std::vector<RunningRequest> running = engine.running();
    EXPECT_GE(running.size() + finished.size(), 3u);
    RankOfEngine other;
    other.engine.update_weights({.version = 1, .model = other.model.get()});
    for (GenerationRequest& request : mixed_requests()) {
      const auto saved = std::ranges::find(running, request.id, &RunningRequest::id);
      if (saved != running.end()) request.begun = saved->samples;
      if (!finished.contains(request.id)) other.engine.submit(std::move(request));
    }
    std::map<uint64_t, GenerationResult> elsewhere = finished;
    for (GenerationResult& result : other.engine.drain()) elsewhere[result.id] = std::move(result);
    std::vector<GenerationResult> in_order;
    for (auto& [id, result] : elsewhere) in_order.push_back(std::move(result));
    expect_same(expected, in_order);

    // Others are served meanwhile.
    engine.park();
    EXPECT_TRUE(engine.idle());
    expect_same(expected, engine.generate(mixed_requests()));
    engine.unpark();
    EXPECT_FALSE(engine.idle());
    const uint64_t last = mixed_requests().back().id;
    EXPECT_TRUE(engine.cancel(last));
    EXPECT_FALSE(engine.cancel(999));
    collect(engine.drain());
    ASSERT_EQ(finished.size(), expected.size());
    EXPECT_EQ(finished.at(last).samples.back().finish_reason, FinishReason::kCancelled);
  });
}

}  // namespace
}  // namespace bough

// Engines of several ranks, threads here, against one.
#include "control/ranks_engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <thread>

#include "rollout/published_weights.h"
#include "rollout/rollout_test_util.h"

namespace bough {
namespace {

std::unique_ptr<EmbeddedEngine> engine_over(const Model& model) {
  return std::make_unique<EmbeddedEngine>(model, engine_options(/*max_running=*/4));
}

struct RankOfEngine {
  std::unique_ptr<Model> model = small_model(at::kDouble, 3);
  std::unique_ptr<Engine> engine = engine_over(*model);
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
    RanksEngine engine(parts[0].engine.get(), parts[0].model->config(), *ranks[0]);
    engine.update_weights({.version = 1, .model = parts[0].model.get()});
    drive(engine);
    engine.end();
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<int64_t> drawn;
  for (const RankOfEngine& part : parts) {
    dynamic_cast<const EmbeddedEngine&>(*part.engine).check_integrity();
    drawn.push_back(part.engine->statistics().new_tokens);
  }
  return drawn;
}

std::vector<GenerationResult> alone() {
  RankOfEngine one;
  return one.engine->generate(mixed_requests());
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
    other.engine->update_weights({.version = 1, .model = other.model.get()});
    for (GenerationRequest& request : mixed_requests()) {
      const auto saved = std::ranges::find(running, request.id, &RunningRequest::id);
      if (saved != running.end()) request.begun = saved->samples;
      if (!finished.contains(request.id)) other.engine->submit(std::move(request));
    }
    std::map<uint64_t, GenerationResult> elsewhere = finished;
    for (GenerationResult& result : other.engine->drain()) elsewhere[result.id] = std::move(result);
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

// ---- Ranks that have nothing but an engine.

// Throws at every so many passes, and after a number of them no more.
class FailingEngine final : public EmbeddedEngine {
 public:
  FailingEngine(const Model& model, int64_t every, int64_t& failures)
      : EmbeddedEngine(model, engine_options(/*max_running=*/4)), every_(every), failures_(failures) {}
  std::vector<GenerationResult> step() override {
    if (++passes_ % every_ == 0 && failures_ > 0) {
      --failures_;
      throw std::runtime_error("memory ran out");
    }
    return EmbeddedEngine::step();
  }

 private:
  const int64_t every_;
  int64_t& failures_;
  int64_t passes_ = 0;
};

struct EngineRank {
  std::unique_ptr<Model> model = small_model(at::kDouble, /*seed=*/99);  // what comes is something else
  std::unique_ptr<ReceivedWeights> weights;
  std::unique_ptr<Engine> engine;
  int64_t failures = 0;
  std::exception_ptr error;
};

// Rank 0 trains, the others generate. `failures`: passes of the first engine rank that throw, of which the
// engine has one every so many passes.
void with_engine_ranks(int64_t num_engines, const std::function<void(RanksEngine&, PublishedWeights&)>& drive,
                       int64_t failures = 0, int64_t every = 7) {
  auto ranks = thread_communicators(1 + num_engines), publication = thread_communicators(1 + num_engines);
  std::vector<EngineRank> parts(static_cast<size_t>(num_engines));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < parts.size(); ++i) {
    EngineRank& own = parts[i];
    own.failures = i == 0 ? failures : 0;
    own.weights = std::make_unique<ReceivedWeights>(*own.model, *publication[i + 1], /*in_place=*/i == 1);
    threads.emplace_back([&own] { own.weights->receive(); });
    threads.emplace_back([&, i] {
      const auto make = [&]() -> std::unique_ptr<Engine> {
        return std::make_unique<FailingEngine>(*own.model, every, own.failures);
      };
      own.engine = make();
      try {
        serve_engine(own.engine, *own.weights, *ranks[i + 1], make);
      } catch (...) {
        own.error = std::current_exception();
      }
    });
  }
  {
    const auto trained = small_model(at::kDouble, 3);
    PublishedWeights published(*trained, *publication[0], /*waits=*/true);
    RanksEngine engine(nullptr, trained->config(), *ranks[0]);
    published.publish(1);
    engine.update_weights(*published.take());
    drive(engine, published);
    published.end();
    if (!parts[0].error) engine.end();
  }
  for (std::thread& thread : threads) thread.join();
  for (const EngineRank& part : parts)
    if (part.error) std::rethrow_exception(part.error);
}

TEST(EngineRanks, DrawWhatOneEngineDrawsFromPublishedWeights) {
  const auto expected = alone();
  for (const int64_t num_engines : {1, 2})
    with_engine_ranks(num_engines, [&](RanksEngine& engine, PublishedWeights& published) {
      expect_same(expected, engine.generate(mixed_requests()));
      EXPECT_GT(engine.take_longest_exchange(), 0);
      EXPECT_EQ(engine.take_longest_exchange(), 0);
      // Another version in the middle of all: every engine has it at once, and what runs goes on.
      for (GenerationRequest& request : mixed_requests()) engine.submit(std::move(request));
      engine.step();
      published.publish(2);
      engine.update_weights(*published.take());
      EXPECT_EQ(engine.version(), 2);
      for (const GenerationResult& result : engine.drain())
        for (const GeneratedSample& sample : result.samples) {
          EXPECT_TRUE(std::ranges::is_sorted(sample.versions));
          EXPECT_EQ(sample.versions.back(), std::ssize(sample.versions) > 8 ? 2 : sample.versions.back());
        }
      const PublishedWeights::Report report = published.take_report();
      EXPECT_EQ(report.publications, 2);
    });
}

TEST(EngineRanks, TokensThatSomebodyWaitsForComeAtTheEnd) {
  with_engine_ranks(1, [&](RanksEngine& engine, PublishedWeights&) {
    std::map<std::pair<uint64_t, int64_t>, std::vector<int32_t>> streamed;
    int64_t last = 0;
    for (GenerationRequest& request : mixed_requests()) {
      request.on_token = [&](const StreamedToken& token) {
        streamed[{token.id, token.sample}].push_back(token.token);
        last += token.is_last;
      };
      engine.submit(std::move(request));
    }
    int64_t samples = 0;
    for (const GenerationResult& result : engine.drain())
      for (size_t s = 0; s < result.samples.size(); ++s, ++samples)
        EXPECT_EQ((streamed[{result.id, static_cast<int64_t>(s)}]), result.samples[s].token_ids);
    EXPECT_EQ(last, samples);
  });
}

TEST(EngineRanks, AnEngineThatThrowsCostsItsRequestsARetry) {
  const auto expected = alone();
  with_engine_ranks(
      2,
      [&](RanksEngine& engine, PublishedWeights&) {
        expect_same(expected, engine.generate(mixed_requests()));
        EXPECT_EQ(engine.num_restarts(), 2);
      },
      /*failures=*/2);
  // With requests put aside, one of them cancelled.
  with_engine_ranks(
      1,
      [&](RanksEngine& engine, PublishedWeights&) {
        for (GenerationRequest& request : mixed_requests()) engine.submit(std::move(request));
        engine.park();
        std::vector<GenerationRequest> others = mixed_requests();
        for (GenerationRequest& request : others) request.id += 1000, request.sequence = request.id - 1000;
        const auto results = engine.generate(std::move(others));
        ASSERT_EQ(results.size(), expected.size());
        for (size_t i = 0; i < results.size(); ++i)
          EXPECT_EQ(results[i].samples[0].token_ids, expected[i].samples[0].token_ids);
        EXPECT_EQ(engine.num_restarts(), 1);
        engine.unpark();
        const uint64_t last = mixed_requests().back().id;
        engine.cancel(last);
        auto parked = engine.drain();
        std::ranges::sort(parked, {}, &GenerationResult::id);
        ASSERT_EQ(parked.size(), expected.size());
        EXPECT_EQ(parked.back().samples.back().finish_reason, FinishReason::kCancelled);
        parked.pop_back();
        expect_same({expected.begin(), expected.end() - 1}, parked);
      },
      /*failures=*/1);
}

}  // namespace
}  // namespace bough

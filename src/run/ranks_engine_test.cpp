// Engines of several ranks (threads here) against one engine.
#include "run/ranks_engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <thread>

#include "rollout/published_weights.h"
#include "rollout/rollout_test_util.h"
#include "run/engine_process.h"

namespace bough {
namespace {

// The contexts of mixed_requests() are within the budget.
EmbeddedEngineOptions options_with_budget() {
  EmbeddedEngineOptions options = engine_options(/*max_running=*/4);
  options.settings.sparse = {.budget = {"16x4"}, .dense_layers = 0};
  return options;
}

std::unique_ptr<EmbeddedEngine> engine_over(const Model& model) {
  return std::make_unique<EmbeddedEngine>(model, options_with_budget());
}

struct RankOfEngine {
  std::unique_ptr<Model> model = small_rollout_model(at::kDouble, 3);
  std::unique_ptr<Engine> engine = engine_over(*model);
  SharedWeights weights{model.get()};
};

// Calls `drive` with rank 0's engine. All engines have version 1 by then. Returns the number of new tokens of
// each rank.
std::vector<int64_t> on_ranks(int64_t num_ranks, const std::function<void(RanksEngine&)>& drive) {
  auto ranks = thread_communicators(num_ranks);
  std::vector<RankOfEngine> parts(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (size_t rank = 1; rank < ranks.size(); ++rank)
    threads.emplace_back([&, rank] {
      parts[rank].weights.publish(1);
      serve_engine(*parts[rank].engine, parts[rank].weights, *ranks[rank]);
    });
  {
    RanksEngine engine(parts[0].engine.get(), parts[0].model->config(), *ranks[0]);
    engine.update_weights({.version = 1, .model = parts[0].model.get()});
    drive(engine);
    engine.end();
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<int64_t> sampled;
  for (const RankOfEngine& part : parts) {
    dynamic_cast<const EmbeddedEngine&>(*part.engine).check_integrity();
    sampled.push_back(part.engine->statistics().new_tokens);
  }
  return sampled;
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

TEST(RanksEngine, SamplesLikeOneEngineAndEveryRankHasAShare) {
  const auto expected = alone();
  for (const int64_t num_ranks : {1, 2, 3}) {
    const auto sampled = on_ranks(num_ranks, [&](RanksEngine& engine) {
      expect_same(expected, engine.generate(mixed_requests()));
      int64_t tokens = 0;
      for (const GenerationResult& result : expected)
        for (const GeneratedSample& sample : result.samples) tokens += std::ssize(sample.token_ids);
      EXPECT_EQ(engine.statistics().new_tokens, tokens);
    });
    for (const int64_t tokens : sampled) EXPECT_GT(tokens, 0) << "a rank of " << num_ranks << " drew nothing";
  }
}

TEST(RanksEngine, RunningRequestsCanBeSavedCancelledAndParked) {
  const auto expected = alone();
  on_ranks(3, [&](RanksEngine& engine) {
    for (GenerationRequest& request : mixed_requests()) engine.submit(std::move(request));
    std::map<uint64_t, GenerationResult> finished;
    const auto collect = [&](std::vector<GenerationResult> results) {
      for (GenerationResult& result : results) finished[result.id] = std::move(result);
    };
    collect(engine.step());
    // Running requests of every rank can be saved, and continue in another engine.
    const std::vector<RunningRequest> running = engine.running();
    EXPECT_GE(running.size() + finished.size(), 3u);
    RankOfEngine other;
    other.engine->update_weights({.version = 1, .model = other.model.get()});
    for (GenerationRequest& request : mixed_requests()) {
      const auto saved = std::ranges::find(running, request.id, &RunningRequest::id);
      if (saved != running.end()) request.partial = saved->samples;
      if (!finished.contains(request.id)) other.engine->submit(std::move(request));
    }
    std::map<uint64_t, GenerationResult> elsewhere = finished;
    for (GenerationResult& result : other.engine->drain()) elsewhere[result.id] = std::move(result);
    std::vector<GenerationResult> in_order;
    for (auto& [id, result] : elsewhere) in_order.push_back(std::move(result));
    expect_same(expected, in_order);

    // Other requests are served meanwhile.
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

// ---- Ranks that have only an engine, in a process of its own.

constexpr const char* kProcess = "BOUGH_TEST_ENGINE_PROCESS";

// Exits, throws or hangs at each pass whose number is a multiple of the job's `every`. All processes of an
// engine together fail at most `count` times.
class FailingEngine final : public EmbeddedEngine {
 public:
  FailingEngine(const Model& model, const Json& job)
      : EmbeddedEngine(model, options_with_budget()), job_(job) {}
  std::vector<GenerationResult> step() override {
    const std::filesystem::path failures = job_.at("failures").get<std::string>();
    if (++passes_ % job_.at("every").get<int64_t>() == 0 &&
        file_size(failures) < job_.at("count").get<uint64_t>()) {
      std::ofstream(failures, std::ios::app) << "!";
      const std::string how = job_.at("how").get<std::string>();
      if (how == "throws") throw std::runtime_error("memory ran out");
      if (how == "wrong input") throw UserError("page 7 is missing");
      std::raise(how == "dies" ? SIGKILL : SIGSTOP);
    }
    return EmbeddedEngine::step();
  }

 private:
  const Json job_;
  int64_t passes_ = 0;
};

// This test program, started again by the tests as an engine process.
class EngineProcessOfTests : public ::testing::Environment {
 public:
  void SetUp() override {
    if (!std::getenv(kProcess)) return;
    run_engine_process([](const Json& job, const ServeEngine& serve) {
      const auto model =
          small_rollout_model(at::kDouble, /*seed=*/99);  // the weights that arrive are different
      FailingEngine engine(*model, job);
      serve(engine, *model, job.at("in_place").get<bool>(), Changing::kTrained);
    });
    std::_Exit(0);
  }
};
::testing::Environment* const kEngineProcess = ::testing::AddGlobalTestEnvironment(new EngineProcessOfTests);

struct Failures {
  std::string how = "dies";
  int64_t count = 0, every = 7;
  double answer_seconds = kAnswerSeconds;
};

// Rank 0 trains, the other ranks generate. `failures`: how the first engine rank fails; the other ones do
// not. Rethrows the exception of an engine rank.
void with_engine_ranks(int64_t num_engines, const std::function<void(RanksEngine&, PublishedWeights&)>& drive,
                       const Failures& failures = {}) {
  auto ranks = thread_communicators(1 + num_engines), publication = thread_communicators(1 + num_engines);
  // Two engines are on another host than rank 0. A single engine is on rank 0's host.
  const auto host = [&](int64_t rank) { return str("host ", rank > 0 && num_engines == 2); };
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) / str("bough_engines_", getpid());
  std::filesystem::create_directories(folder);
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  std::exception_ptr error;
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < num_engines; ++i)
    threads.emplace_back([&, i] {
      const std::filesystem::path file = folder / std::to_string(i);
      std::ofstream{file};
      const Json job = {{"failures", file.string()},
                        {"how", failures.how},
                        {"count", i == 0 ? failures.count : 0},
                        {"every", failures.every},
                        {"in_place", i == 1}};
      const auto rank = static_cast<size_t>(1 + i);
      PublicationRanks publication_ranks(std::move(publication[rank]), host(1 + i));
      EngineProcess engine({"/usr/bin/env", str(kProcess, "=1"), program, "--gtest_brief=1"}, job,
                           *ranks[rank], publication_ranks, failures.answer_seconds);
      std::thread receiving([&] { engine.receive_weights(); });
      try {
        serve_engine(engine, *ranks[rank]);
      } catch (...) {
        error = std::current_exception();
        ranks[0]->set_abort_check([] { throw IoError("an engine rank has ended"); });
      }
      receiving.join();
    });
  {
    const auto trained = small_rollout_model(at::kDouble, 3);
    PublicationRanks publication_ranks(std::move(publication[0]), host(0));
    PublishedWeights published(*trained, publication_ranks, /*waits=*/true);
    RanksEngine engine(nullptr, trained->config(), *ranks[0]);
    published.publish(1);
    engine.update_weights(*published.take());
    try {
      drive(engine, published);
      engine.end();
    } catch (const IoError&) {  // `error`, the engine rank's exception, says why
    }
    published.end();
  }
  for (std::thread& thread : threads) thread.join();
  std::filesystem::remove_all(folder);
  if (error) std::rethrow_exception(error);
}

TEST(EngineRanks, SampleLikeOneEngineFromPublishedWeights) {
  const auto expected = alone();
  for (const int64_t num_engines : {1, 2})
    with_engine_ranks(num_engines, [&](RanksEngine& engine, PublishedWeights& published) {
      expect_same(expected, engine.generate(mixed_requests()));
      EXPECT_GT(engine.take_longest_exchange(), 0);
      EXPECT_EQ(engine.take_longest_exchange(), 0);
      // A new version while requests run: every engine gets it at once, and running requests continue.
      for (GenerationRequest& request : mixed_requests()) engine.submit(std::move(request));
      engine.step();
      published.publish(2);
      engine.update_weights(*published.take());
      EXPECT_EQ(engine.version(), 2);
      engine.update_weights({.version = 2, .model = nullptr});  // as after an evaluation
      for (const GenerationResult& result : engine.drain())
        for (const GeneratedSample& sample : result.samples) {
          EXPECT_TRUE(std::ranges::is_sorted(sample.versions));
          EXPECT_EQ(sample.versions.back(), std::ssize(sample.versions) > 8 ? 2 : sample.versions.back());
        }
      const PublishedWeights::Report report = published.take_report();
      EXPECT_EQ(report.publications, 2);
    });
}

TEST(EngineRanks, StreamedTokensComeWithTheResult) {
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

TEST(EngineRanks, RequestsOfAnEngineThatEndsAreRetried) {
  const auto expected = alone();
  for (const Failures& failures : {Failures{.how = "dies", .count = 2}, Failures{.how = "throws", .count = 2},
                                   Failures{.how = "hangs", .count = 1, .answer_seconds = 2}})
    with_engine_ranks(
        2,
        [&](RanksEngine& engine, PublishedWeights& published) {
          expect_same(expected, engine.generate(mixed_requests()));
          EXPECT_GE(engine.num_restarts(), failures.count) << failures.how;
          // The restarted engine process got the earlier commands, and later commands reach it.
          published.publish(2);
          engine.update_weights(*published.take());
          for (const GenerationResult& result : engine.generate(mixed_requests()))
            EXPECT_EQ(result.samples[0].versions.back(), 2);
          EXPECT_GT(engine.statistics().new_tokens, 0);
        },
        failures);
}

TEST(EngineRanks, ParkedRequestsOutliveAnEngine) {
  const auto expected = alone();
  with_engine_ranks(1,
                    [&](RanksEngine& engine, PublishedWeights&) {
                      for (GenerationRequest& request : mixed_requests()) engine.submit(std::move(request));
                      engine.park();
                      std::vector<GenerationRequest> others = mixed_requests();
                      for (GenerationRequest& request : others)
                        request.id += 1000, request.sequence = request.id - 1000;
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
                    {.count = 1});
}

// Requests whose contexts exceed the budget.
std::vector<GenerationRequest> long_requests() {
  std::vector<GenerationRequest> requests;
  for (uint64_t i = 0; i < 3; ++i) {
    requests.push_back(request_of(i, random_tokens(i, 30, 97), 2, 90));
    requests.back().sampling.ignore_eos = true;
  }
  return requests;
}

TEST(EngineRanks, AllEnginesSampleFromTheGivenPolicyAlsoRestartedOnes) {
  const RankOfEngine one;
  const auto sparse = one.engine->generate(long_requests());
  const auto dense = EmbeddedEngine(*one.model, engine_options()).generate(long_requests());
  const auto tokens = [](const std::vector<GenerationResult>& results) {
    std::vector<std::vector<int32_t>> all;
    for (const GenerationResult& result : results)
      for (const GeneratedSample& sample : result.samples) all.push_back(sample.token_ids);
    return all;
  };
  ASSERT_NE(tokens(sparse), tokens(dense));
  const auto drive = [&](RanksEngine& engine) {
    for (GenerationRequest& request : mixed_requests()) engine.submit(std::move(request));
    engine.park();
    engine.sample_from(SampledPolicy::kDense);
    EXPECT_EQ(tokens(engine.generate(long_requests())), tokens(dense));
    engine.sample_from(SampledPolicy::kGenerating);
    EXPECT_EQ(tokens(engine.generate(long_requests())), tokens(sparse));
    engine.unpark();
    engine.drain();
  };
  on_ranks(2, drive);
  with_engine_ranks(2,
                    [&](RanksEngine& engine, PublishedWeights&) {
                      drive(engine);
                      EXPECT_EQ(engine.num_restarts(), 1);
                    },
                    {.count = 1, .every = 30});
}

TEST(EngineRanks, FailIfEveryEngineEndsOrTheInputIsWrong) {
  const auto drive = [](RanksEngine& engine, PublishedWeights&) { engine.generate(mixed_requests()); };
  const auto of = [&](const std::string& how) {
    return [&, how] { with_engine_ranks(1, drive, {.how = how, .count = 100, .every = 1}); };
  };
  EXPECT_EQ(message_of<IoError>(of("dies")),
            "the engine process of rank 1 was started 4 times without finishing a request; the last one was "
            "killed by signal 9 (Killed)");
  EXPECT_EQ(message_of<UserError>(of("wrong input")), "page 7 is missing");
}

}  // namespace
}  // namespace bough

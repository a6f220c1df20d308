#include <atomic>
#include <map>
#include <numeric>
#include <set>

#include "base/clock.h"
#include "engine/server_test_util.h"

namespace bough {
namespace {

TEST_F(ServerEngineTest, SamplesAreWhatTheServerStreams) {
  FakeServer server;
  ServerEngine engine(options({server.url()}));
  update(engine, 0);
  GenerationRequest asked = request(7, 3, 5);
  asked.sampling.top_logprobs = 2;
  std::vector<StreamedToken> streamed;
  asked.on_token = [&](const StreamedToken& token) { streamed.push_back(token); };
  const auto results = engine.generate({asked, request(8, 1, 100, 49'990)});
  ASSERT_EQ(results.size(), 2u);
  ASSERT_EQ(results[0].samples.size(), 3u);
  for (const GeneratedSample& sample : results[0].samples) {
    EXPECT_EQ(sample.token_ids, (std::vector<int32_t>{11, 12, 13, 14, 15}));
    EXPECT_EQ(sample.logprobs, std::vector<double>(5, -0.125));
    EXPECT_EQ(sample.versions, std::vector<int32_t>(5, 0));
    EXPECT_EQ(sample.finish_reason, FinishReason::kLength);
    EXPECT_EQ(sample.top_ids[0], (std::vector<int32_t>{4, 11})) << "by falling probability";
    EXPECT_FLOAT_EQ(sample.top_logprobs[0][1], -0.125f);
  }
  EXPECT_EQ(results[1].samples[0].finish_reason, FinishReason::kStop);
  EXPECT_EQ(results[1].samples[0].token_ids.back(), 50'000);
  EXPECT_EQ(streamed.size(), 15u);
  EXPECT_EQ(std::count_if(streamed.begin(), streamed.end(), [](const auto& t) { return t.is_last; }), 3);
  for (const Json& sent : server.requests())
    EXPECT_FALSE(sent.contains("seed")) << "vLLM for CPUs dies of one";
  EXPECT_EQ(engine.statistics().new_tokens, 25);
}

TEST_F(ServerEngineTest, AStopStringEndsASampleWithTheTokenThatCompletesIt) {
  FakeServer server;
  ServerEngine engine(options({server.url()}));
  update(engine, 0);
  GenerationRequest asked = request(1, 1, 100, 25);  // generates a, b, c, d, ...
  asked.sampling.stop = {"cd"};
  const auto results = engine.generate({asked});
  EXPECT_EQ(results[0].samples[0].token_ids, (std::vector<int32_t>{26, 27, 28, 29}));
  EXPECT_EQ(results[0].samples[0].finish_reason, FinishReason::kStopString);
}

// Tokens sampled before an update have the old version, later tokens the new one. No token is lost or sampled
// twice. The server ends its requests before it loads the weights.
TEST_F(ServerEngineTest, AnUpdateInterruptsAndEachTokenHasItsVersion) {
  FakeServer server;
  server.holds_after = 40;  // so no sample ends before the update
  ServerEngine engine(options({server.url()}));
  update(engine, 1);  // version 1: tokens increase by two
  engine.submit(request(1, 8, 60));
  while (engine.statistics().new_tokens < 100) engine.step();
  server.busy_resets = 2;
  EXPECT_TRUE(engine.ready_for_weights());
  update(engine, 4);
  server.holds_after = FakeServer::kNever;
  EXPECT_FALSE(engine.ready_for_weights()) << "interrupted samples have drawn nothing since";
  EXPECT_FALSE(std::filesystem::exists(folder_ / "v1"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "v4"));
  const auto results = engine.drain();
  EXPECT_TRUE(engine.ready_for_weights());
  ASSERT_EQ(results.size(), 1u);
  int64_t old = 0, fresh = 0;
  for (const GeneratedSample& sample : results[0].samples) {
    ASSERT_EQ(sample.token_ids.size(), 60u);
    int32_t token = 10;
    for (size_t i = 0; i < 60; ++i) {
      ASSERT_TRUE(sample.versions[i] == 1 || sample.versions[i] == 4);
      ASSERT_TRUE(i == 0 || sample.versions[i] >= sample.versions[i - 1]);
      token += 1 + sample.versions[i];
      ASSERT_EQ(sample.token_ids[i], token) << "sampled by weights of another version than its own";
      ++(sample.versions[i] == 1 ? old : fresh);
    }
  }
  EXPECT_GE(old, 100);
  EXPECT_GT(fresh, 0);
  const auto targets = server.targets();
  const auto pause = std::find(targets.rbegin(), targets.rend(), "/pause");
  EXPECT_NE(pause, targets.rend());
  update(engine, 4);
  EXPECT_EQ(server.targets().size(), targets.size()) << "the server has these weights";
}

TEST_F(ServerEngineTest, ABrokenStreamGoesOnWhereItWas) {
  FakeServer server;
  server.break_after = 7;
  ServerEngine engine(options({server.url()}));
  update(engine, 0);
  const auto results = engine.generate({request(1, 2, 40)});
  for (const GeneratedSample& sample : results[0].samples) {
    std::vector<int32_t> expected(40);
    std::iota(expected.begin(), expected.end(), 11);
    EXPECT_EQ(sample.token_ids, expected);
  }
}

// When the server is back, a new process has its port. The new process has other weights until it loads the
// published ones.
TEST_F(ServerEngineTest, AServerThatDiesCostsARetryAndGetsTheWeightsWhenItIsBack) {
  FakeServer other;
  auto dying = std::make_unique<FakeServer>();
  const uint16_t port = dying->port();
  // Slow enough that streams are still open when the server dies, also under a sanitizer.
  other.pause_microseconds = dying->pause_microseconds = 10000;
  ServerEngine engine(options({dying->url(), other.url()}));
  update(engine, 3);
  for (uint64_t id = 0; id < 6; ++id) engine.submit(request(id, 4, 50, static_cast<int32_t>(100 * id)));
  std::vector<GenerationResult> results;
  while (engine.statistics().new_tokens < 200) engine.step();
  EXPECT_GT(dying->requests().size(), 0u);
  dying.reset();
  FakeServer again(port);
  again.version = 77;
  while (!engine.idle())
    for (GenerationResult& result : engine.step()) results.push_back(std::move(result));
  EXPECT_EQ(results.size(), 6u);
  engine.submit(request(9, 64, 3));
  const auto begin = std::chrono::steady_clock::now();
  while (again.requests().empty() && seconds_since(begin) < 20) {
    engine.step();
    if (engine.idle()) engine.submit(request(9, 64, 3));
  }
  EXPECT_FALSE(again.requests().empty()) << "it is given work again";
  EXPECT_EQ(again.version, 3);
  while (!engine.idle())
    for (GenerationResult& result : engine.step()) results.push_back(std::move(result));
  for (const GenerationResult& result : results)
    for (const GeneratedSample& sample : result.samples) {
      int32_t token = result.prompt_ids.back();
      for (const int32_t sampled : sample.token_ids) EXPECT_EQ(sampled, token += 4);
    }
}

TEST_F(ServerEngineTest, AServerThatRestartsWhileItIsIdleGetsTheWeightsBeforeASample) {
  auto server = std::make_unique<FakeServer>();
  const uint16_t port = server->port();
  ServerEngine engine(options({server->url()}));
  update(engine, 3);
  EXPECT_EQ(engine.generate({request(1, 2, 5)})[0].samples[0].token_ids.back(), 30);
  const size_t calls = server->targets().size();
  engine.generate({request(2, 2, 5)});
  EXPECT_EQ(server->targets().size(), calls + 2) << "a server that did not restart gets samples only";
  server.reset();
  FakeServer again(port);
  again.version = 77;
  const auto results = engine.generate({request(3, 2, 5)});
  for (const GeneratedSample& sample : results[0].samples)
    EXPECT_EQ(sample.token_ids, (std::vector<int32_t>{14, 18, 22, 26, 30}));
  EXPECT_EQ(again.version, 3);
}

TEST_F(ServerEngineTest, WhenNoServerIsLeftItSaysWhichAndWhy) {
  auto server = std::make_unique<FakeServer>();
  auto settings = options({server->url()});
  settings.settings.timeout_seconds = 1;
  ServerEngine engine(settings);
  update(engine, 0);
  server->pause_microseconds = 1000;
  engine.submit(request(1, 2, 1000));
  for (int i = 0; i < 20; ++i) engine.step();
  const std::string url = server->url();
  server.reset();
  std::string message;
  try {
    while (true) engine.step();
  } catch (const IoError& error) {
    message = error.what();
  }
  EXPECT_NE(message.find(url), std::string::npos) << message;
  EXPECT_NE(message.find("rollout.servers.timeout_seconds"), std::string::npos) << message;
}

// Requests with a common prefix go to the server that has the prefix, until that server has far more load.
TEST_F(ServerEngineTest, RequestsFollowTheirPrefixUnlessItsServerIsFull) {
  FakeServer one, two;
  one.pause_microseconds = two.pause_microseconds = 500;
  ServerEngine engine(options({one.url(), two.url()}));
  update(engine, 0);
  const auto turn = [](uint64_t id, int32_t conversation, int64_t tokens) {
    GenerationRequest out = request(id, 1, 4);
    out.prompt_ids.assign(static_cast<size_t>(tokens), conversation);
    return out;
  };
  std::map<int32_t, std::set<int>> servers_of;
  for (uint64_t round = 0; round < 4; ++round) {
    for (int32_t conversation = 1; conversation <= 6; ++conversation)
      engine.submit(turn(10 * round + static_cast<uint64_t>(conversation), conversation,
                         200 + 64 * static_cast<int64_t>(round)));
    engine.drain();
  }
  for (const auto& [number, server] : {std::pair{0, &one}, {1, &two}}) {
    EXPECT_GE(server->requests().size(), 8u) << "both work";
    for (const Json& sent : server->requests()) servers_of[sent.at("prompt").at(0)].insert(number);
  }
  for (const auto& [conversation, servers] : servers_of) EXPECT_EQ(servers.size(), 1u) << conversation;
  // One prompt with many samples: if all went to the prompt's server, the other server would be idle.
  const size_t before_one = one.requests().size(), before_two = two.requests().size();
  engine.submit(request(99, 40, 30));
  engine.drain();
  EXPECT_GE(one.requests().size() - before_one, 10u);
  EXPECT_GE(two.requests().size() - before_two, 10u);
}

TEST_F(ServerEngineTest, ParkedRequestsGoOnAndCancelledOnesEnd) {
  FakeServer server;
  server.pause_microseconds = 1000;
  server.holds_after = 15;  // so no request ends before it is parked
  ServerEngine engine(options({server.url()}));
  update(engine, 0);
  engine.submit(request(1, 2, 30));
  engine.submit(request(2, 2, 4000));
  while (engine.statistics().new_tokens < 20) engine.step();
  engine.park();
  server.holds_after = FakeServer::kNever;
  EXPECT_TRUE(engine.idle());
  EXPECT_EQ(engine.generate({request(1, 1, 3)})[0].samples[0].token_ids.size(), 3u);
  engine.unpark();
  const auto running = engine.running();
  ASSERT_EQ(running.size(), 2u);
  EXPECT_FALSE(engine.cancel(5));
  EXPECT_TRUE(engine.cancel(2));
  const auto results = engine.drain();
  ASSERT_EQ(results.size(), 2u);
  for (const GenerationResult& result : results)
    for (const GeneratedSample& sample : result.samples) {
      if (result.id == 1) EXPECT_EQ(sample.token_ids.size(), 30u);
      else EXPECT_EQ(sample.finish_reason, FinishReason::kCancelled);
      for (size_t i = 0; i < sample.token_ids.size(); ++i)
        EXPECT_EQ(sample.token_ids[i], 11 + static_cast<int32_t>(i));
    }
  // A partial rollout that another process began is continued.
  GenerationRequest taken_up = request(3, 2, 10);
  PartialRollout partial;
  partial.sample.token_ids = {11, 12};
  partial.sample.logprobs = partial.sample.raw_logprobs = partial.sample.sampling_logprobs = {-1, -1};
  partial.sample.versions = {0, 0};
  taken_up.partial = {partial};
  const auto whole = engine.generate({taken_up});
  EXPECT_EQ(whole[0].samples[0].token_ids, whole[0].samples[1].token_ids);
  EXPECT_EQ(whole[0].samples[0].logprobs[1], -1);
}

TEST_F(ServerEngineTest, NoMoreRunThanAllowed) {
  FakeServer server;
  server.pause_microseconds = 300;
  auto settings = options({server.url()});
  settings.max_concurrent = 3;
  ServerEngine engine(settings);
  update(engine, 0);
  EXPECT_EQ(engine.generate({request(1, 12, 5)})[0].samples.size(), 12u);
  EXPECT_LE(server.most_streams, 5) << "the server may learn a little later that a client is gone";
}

TEST_F(ServerEngineTest, SamplingThatChangesLogProbabilitiesIsRefused) {
  FakeServer server;
  ServerEngine engine(options({server.url()}));
  const auto with = [&](auto change) {
    GenerationRequest asked = request(1, 1, 5);
    change(asked.sampling);
    return refusal(engine, asked);
  };
  EXPECT_NE(with([](auto& s) { s.top_p = 0.9; }).find("top_p is 0.9"), std::string::npos);
  EXPECT_NE(with([](auto& s) { s.top_k = 5; }).find("top_k is 5"), std::string::npos);
  EXPECT_NE(with([](auto& s) { s.min_p = 0.1; }).find("min_p"), std::string::npos);
  EXPECT_NE(with([](auto& s) { s.repetition_penalty = 1.1; }).find("repetition_penalty"), std::string::npos);
  EXPECT_NE(with([](auto& s) { s.presence_penalty = 1; }).find("presence_penalty"), std::string::npos);
  EXPECT_NE(with([](auto& s) { s.frequency_penalty = 1; }).find("frequency_penalty"), std::string::npos);
  EXPECT_NE(with([](auto& s) { s.min_new_tokens = 2; }).find("min_new_tokens"), std::string::npos);
  EXPECT_TRUE(engine.idle());
}

TEST_F(ServerEngineTest, AServerThatReportsOtherLogProbabilitiesIsRefused) {
  FakeServer server;
  auto settings = options({server.url()});
  double own = -0.125;
  settings.score = [&](const Model&, const std::vector<int32_t>& ids, size_t begin, double temperature,
                       const RoutedExperts&) {
    return std::vector<double>(ids.size() - begin, own / temperature);
  };
  settings.settings.max_logprob_difference = 0.02;
  {
    ServerEngine engine(settings);
    update(engine, 0);
  }
  const auto message = [&] {
    ServerEngine engine(settings);
    try {
      update(engine, 0);
    } catch (const UserError& error) {
      return std::string(error.what());
    }
    return std::string("it was taken");
  };
  server.is_raw = true;
  EXPECT_NE(message().find("they are those of temperature 1"), std::string::npos) << message();
  EXPECT_NE(message().find("processed_logprobs"), std::string::npos);
  server.is_raw = false;
  own = -3;
  EXPECT_NE(message().find("check that it serves this model"), std::string::npos) << message();
  server.is_dev = false;
  try {
    ServerEngine engine(settings);
    update(engine, 0);
    FAIL() << "a server without the routes for weights";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("VLLM_SERVER_DEV_MODE=1"), std::string::npos) << error.what();
  }
}

TEST(ServerApi, SglangListsAllTokensOrThoseOfTheEvent) {
  const ServerApi& api = server_api("sglang");
  const auto event = [](size_t total, Json listed, Json reason = nullptr) -> Json {
    return {{"meta_info",
             {{"completion_tokens", total}, {"output_token_logprobs", listed}, {"finish_reason", reason}}}};
  };
  const Json a = {-0.5, 7, nullptr}, b = {-0.25, 8, nullptr};
  EXPECT_EQ(api.event(event(1, {a}), 0, 0).tokens.at(0).id, 7);
  const ServerEvent of_all = api.event(event(2, {a, b}), 1, 0);
  ASSERT_EQ(of_all.tokens.size(), 1u);
  EXPECT_EQ(of_all.tokens[0].id, 8);
  const ServerEvent own = api.event(event(2, Json::array({b}), {{"type", "length"}}), 1, 0);
  ASSERT_EQ(own.tokens.size(), 1u);
  EXPECT_EQ(own.tokens[0].logprob, -0.25);
  EXPECT_EQ(own.finish_reason, "length");
  EXPECT_THROW(api.event(event(4, Json::array({b})), 1, 0), UserError) << "a token without one";
}

}  // namespace
}  // namespace bough

#include "engine/server_experts.h"

#include <gtest/gtest.h>

#include <cstring>

#include "engine/server_test_util.h"

namespace bough {
namespace {

template <class Action>
std::string refusal_of(const Action& action) {
  try {
    action();
  } catch (const UserError& error) {
    return error.what();
  }
  return "it was taken";
}

void expect_words(const std::string& message, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << word << ": " << message;
}

template <class T>
std::string elements_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Two tokens, three layers of which the second one is dense, two experts a token.
const std::vector<int> kNumbers = {3, 1, 0, 0, 4, 2, 0, 4, 0, 0, 1, 3};
const RoutedExperts kRouted{.num_layers = 2, .num_chosen = 2, .experts = {3, 1, 4, 2, 0, 4, 1, 3}};

template <class T>
Json npy_text(const std::string& type, const std::string& shape = "(2, 3, 2)",
              std::vector<int> numbers = kNumbers) {
  return base64_of(npy_of(type, shape, elements_of(std::vector<T>(numbers.begin(), numbers.end()))));
}

TEST(ServerExperts, AreReadFromBothServersFormats) {
  const ExpertLayout layout = fake_layout();
  EXPECT_EQ(experts_of_npy(npy_text<uint8_t>("|u1"), layout, 2), kRouted);
  EXPECT_EQ(experts_of_npy(npy_text<uint16_t>("<u2"), layout, 2), kRouted);
  EXPECT_EQ(experts_of_npy(npy_text<int32_t>("<i4"), layout, 2), kRouted);
  EXPECT_EQ(experts_of_int32(base64_of(elements_of(kNumbers)), layout, 2), kRouted);
  ExpertLayout all = layout;
  all.dense_layers.clear();
  all.num_layers = 2;
  const RoutedExperts two = experts_of_npy(npy_text<uint8_t>("|u1", "(1, 2, 2)", {3, 1, 0, 2}), all, 1);
  EXPECT_EQ(two.experts, (std::vector<uint16_t>{3, 1, 0, 2}));
}

TEST(ServerExperts, OtherArraysOfVllmAreRefused) {
  const auto refused = [](const Json& text, const std::vector<std::string>& words, int64_t rows = 2) {
    expect_words(refusal_of([&] { experts_of_npy(text, fake_layout(), rows); }), words);
  };
  refused(Json::array({1, 2}), {"routed_experts", "[1,2]", "base64 text of a .npy file", "vLLM 0.32"});
  refused("a*==", {"a*==", ".npy"});
  refused(base64_of("PK and so on"), {"bytes that begin with", "PK and", ".npy"});
  refused(npy_text<int64_t>("<i8"), {"<i8", "uint8, uint16 or int32"});
  refused(npy_text<float>("<f4"), {"<f4"});
  refused(npy_text<uint8_t>("|u1", "(2, 2, 2)"),
          {"the shape 2 2 2", "2 rows of 3 layers with 2 experts", "trained model"});
  refused(npy_text<uint8_t>("|u1"), {"the shape 2 3 2", "3 rows of 3 layers"}, 3);
  refused(npy_text<uint8_t>("|u1", "(2, 3, 2)", {3, 1, 0}), {"without its end"});
  refused(npy_text<uint8_t>("|u1", "(12)"), {"the shape 12"});
  std::string fortran = npy_of("|u1", "(2, 3, 2)", std::string(12, '\0'));
  fortran.replace(fortran.find("False"), 5, "True ");
  refused(base64_of(fortran), {"fortran_order"});
}

TEST(ServerExperts, NumbersThatTheModelCannotHaveChosenAreRefused) {
  const auto refused = [](size_t at, int number, const std::vector<std::string>& words) {
    std::vector<int> numbers = kNumbers;
    numbers[at] = number;
    expect_words(refusal_of([&] { experts_of_int32(base64_of(elements_of(numbers)), fake_layout(), 2); }),
                 words);
  };
  refused(0, 5, {"expert 5 of token 0 in layer 0", "from 0 to 4", "serves the trained model"});
  refused(11, -1, {"expert -1 of token 1 in layer 2", "from 0 to 4"});
  refused(10, 3, {"expert 3 twice of token 1 in layer 2", "different experts"});
  refused(9, 2, {"expert 2 of token 1 in layer 1", "expected 0", "no experts"});
  expect_words(refusal_of([&] { experts_of_int32(base64_of(elements_of(kNumbers)), fake_layout(), 3); }),
               {"48 bytes", "72 bytes", "3 rows of 3 layers with 2 experts"});
  expect_words(refusal_of([&] { experts_of_int32(nullptr, fake_layout(), 2); }), {"null", "SGLang 0.5.23"});
}

// ---- Samples

class ServerExpertsTest : public ServerEngineTest {
 protected:
  ServerEngineOptions recording(const FakeServer& server) {
    ServerEngineOptions out = options({server.url()});
    out.experts = fake_layout();
    return out;
  }
  // The rows that a server of `version` records for all tokens but the last.
  static RoutedExperts rows_of(const GenerationResult& result, const GeneratedSample& sample, int version) {
    std::vector<int32_t> ids = result.prompt_ids;
    ids.insert(ids.end(), sample.token_ids.begin(), sample.token_ids.end() - 1);
    RoutedExperts out{.num_layers = 2, .num_chosen = 2};
    for (const int32_t id : ids)
      for (const int layer : {0, 2})
        for (const int k : {0, 1})
          out.experts.push_back(static_cast<uint16_t>(fake_expert(id, layer, k, version)));
    return out;
  }
};

TEST_F(ServerExpertsTest, EachSampleHasTheRowsOfAllTokensButTheLast) {
  FakeServer server;
  ServerEngine engine(recording(server));
  update(engine, 0);
  GenerationRequest asked = request(7, 3, 5);
  asked.sampling.top_logprobs = 2;
  for (const GenerationResult& result : engine.generate({asked, request(8, 1, 100, 49'990)}))
    for (const GeneratedSample& sample : result.samples) {
      EXPECT_EQ(sample.routed_experts, rows_of(result, sample, 0));
      if (result.id == 7) {
        EXPECT_EQ(sample.top_ids[0], (std::vector<int32_t>{4, 11}));
      } else {
        EXPECT_EQ(sample.token_ids.back(), 50'000);
        EXPECT_EQ(sample.finish_reason, FinishReason::kStop);
      }
    }
  EXPECT_EQ(server.targets().back(), "/inference/v1/generate") << "/v1/completions streams no experts";
}

TEST_F(ServerExpertsTest, RowsOfLongPromptsFitIntoOneEvent) {
  FakeServer server;
  ServerEngine engine(recording(server));
  update(engine, 0);
  GenerationRequest asked = request(1, 1, 3);
  asked.prompt_ids.assign(200'000, 17);  // 1.6 MB of base64 text
  const auto results = engine.generate({asked});
  EXPECT_EQ(results[0].samples[0].routed_experts, rows_of(results[0], results[0].samples[0], 0));
}

// The fake server ignores stop strings, as a real one does if it splits the text otherwise.
TEST_F(ServerExpertsTest, ASampleThatAStopStringEndsWaitsForItsRows) {
  FakeServer server;
  ServerEngine engine(recording(server));
  update(engine, 0);
  GenerationRequest asked = request(1, 1, 30, 25);  // generates a, b, c, d, ...
  asked.sampling.stop = {"cd"};
  const auto results = engine.generate({asked});
  const GeneratedSample& sample = results[0].samples[0];
  EXPECT_EQ(sample.token_ids, (std::vector<int32_t>{26, 27, 28, 29}));
  EXPECT_EQ(sample.finish_reason, FinishReason::kStopString);
  EXPECT_EQ(sample.routed_experts, rows_of(results[0], sample, 0));
  EXPECT_EQ(server.requests()[0].at("sampling_params").at("stop"), Json::array({"cd"}));
}

TEST_F(ServerExpertsTest, ASampleThatNewWeightsInterruptHasTheRowsOfItsLastStream) {
  FakeServer server;
  server.holds_after = 40;  // so no sample ends before the update
  ServerEngine engine(recording(server));
  update(engine, 1);
  engine.submit(request(1, 8, 60));
  while (engine.statistics().new_tokens < 100) engine.step();
  update(engine, 4);
  server.holds_after = FakeServer::kNever;
  const auto results = engine.drain();
  for (const GeneratedSample& sample : results[0].samples) {
    ASSERT_EQ(sample.token_ids.size(), 60u);
    EXPECT_EQ(sample.routed_experts, rows_of(results[0], sample, 4));
  }
  EXPECT_GE(engine.statistics().rerouted_experts, 100);
}

TEST_F(ServerExpertsTest, RowsThatAreLostWithTheirStreamAreAskedForAgain) {
  FakeServer server;
  ServerEngine engine(recording(server));
  update(engine, 0);
  server.lost_ends = 2;
  const auto results = engine.generate({request(1, 1, 6)});
  const GeneratedSample& sample = results[0].samples[0];
  EXPECT_EQ(sample.token_ids, (std::vector<int32_t>{11, 12, 13, 14, 15, 16}));
  EXPECT_EQ(sample.finish_reason, FinishReason::kLength);
  EXPECT_EQ(sample.routed_experts, rows_of(results[0], sample, 0));
  EXPECT_EQ(server.requests().size(), 3u);
  const Json last = server.requests().back();
  EXPECT_EQ(last.at("token_ids"), Json({1, 2, 10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(last.at("sampling_params").at("max_tokens"), 1);
}

TEST_F(ServerExpertsTest, AnUpdateBeforeTheRowsArriveLeavesTheTokensAsTheyAre) {
  FakeServer server;
  server.holds_ends = true;
  ServerEngine engine(recording(server));
  update(engine, 0);
  engine.submit(request(1, 1, 3));
  while (engine.statistics().new_tokens < 3) engine.step();
  const auto running = engine.running();
  ASSERT_EQ(running.size(), 1u);
  EXPECT_TRUE(running[0].samples[0].has_ended) << "all tokens are known";
  EXPECT_EQ(running[0].samples[0].sample.finish_reason, FinishReason::kLength);
  update(engine, 2);
  EXPECT_FALSE(engine.ready_for_weights());
  server.holds_ends = false;
  const auto results = engine.drain();
  EXPECT_TRUE(engine.ready_for_weights());
  EXPECT_EQ(results[0].samples[0].token_ids, (std::vector<int32_t>{11, 12, 13}));
  EXPECT_EQ(results[0].samples[0].versions, (std::vector<int32_t>{0, 0, 0}));
  EXPECT_EQ(results[0].samples[0].routed_experts, rows_of(results[0], results[0].samples[0], 2));
  // Another process takes up the request: the complete sample gets its rows, the other one its tokens, too.
  GenerationRequest taken_up = request(2, 2, 3);
  taken_up.partial = running[0].samples;
  const size_t before = server.requests().size();
  const auto whole = engine.generate({taken_up});
  EXPECT_EQ(whole[0].samples[0].token_ids, (std::vector<int32_t>{11, 12, 13}));
  EXPECT_EQ(whole[0].samples[0].routed_experts, rows_of(whole[0], whole[0].samples[0], 2));
  EXPECT_EQ(server.requests().size(), before + 2);
  taken_up.partial = {{.sample = whole[0].samples[0], .has_ended = true}};
  engine.generate({taken_up});
  EXPECT_EQ(server.requests().size(), before + 3) << "a sample with its rows needs no request";
}

TEST_F(ServerExpertsTest, AServerWithoutThemIsRefusedWithTheRemedy) {
  FakeServer server;
  auto settings = recording(server);
  const auto message = [&] {
    return refusal_of([&] {
      ServerEngine engine(settings);
      update(engine, 0);
      engine.generate({request(1, 1, 3)});
    });
  };
  server.has_experts = false;
  expect_words(message(), {server.url(), "no routed_experts", "--enable-return-routed-experts"});
  server.has_experts = true;
  server.surplus_rows = 1;
  expect_words(message(), {server.url(), "the shape 6 3 2", "5 rows"});
  server.surplus_rows = -1;
  expect_words(message(), {"the shape 4 3 2", "5 rows"});
  // The check after a weight update finds this before any sample is lost.
  settings.score = [](const Model&, const std::vector<int32_t>& ids, size_t begin, double,
                      const RoutedExperts& routed) {
    EXPECT_EQ(routed.num_rows(), std::ssize(ids) - 1);
    return std::vector<double>(ids.size() - begin, -0.125);
  };
  expect_words(message(), {"22 3 2", "23 rows"});
  server.surplus_rows = 0;
  EXPECT_EQ(message(), "it was taken");
  server.has_generate = false;
  expect_words(message(), {server.url(), "no route /inference/v1/generate", "--enable-scale-out"});
}

TEST(ServerApi, SglangSendsExpertsWithTheLastEvent) {
  const ServerApi& api = server_api("sglang");
  ServerRequest asked{.id = "a", .input_ids = {1}, .returns_experts = true, .stop = {"x"}};
  const Json sent = api.generate(asked, "").body;
  EXPECT_EQ(sent.at("return_routed_experts"), true);
  EXPECT_EQ(sent.at("sampling_params").at("stop"), Json::array({"x"}));
  const Json event = {{"meta_info",
                       {{"completion_tokens", 2},
                        {"output_token_logprobs", {{-0.5, 7, nullptr}, {-0.25, 8, nullptr}}},
                        {"finish_reason", {{"type", "length"}, {"length", 2}}},
                        {"routed_experts", base64_of(elements_of(kNumbers))}}}};
  const ServerEvent read = api.event(event, 1, 0);
  EXPECT_TRUE(read.is_complete());
  EXPECT_EQ(api.experts(read, fake_layout(), 2), kRouted);
  expect_words(refusal_of([&] { api.experts({}, fake_layout(), 2); }),
               {"no routed_experts", "sglang.launch_server", "--enable-return-routed-experts"});
}

}  // namespace
}  // namespace bough

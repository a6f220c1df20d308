#include "env/http_reward.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "base/error.h"
#include "base/json.h"
#include "base/mutex.h"
#include "env/env_test_util.h"
#include "net/http_client.h"

namespace bough {
namespace {

class HttpReward : public testing::Test {
 protected:
  HttpReward() {
    settings_.timeout_seconds = 30;
    settings_.retries = 0;
  }
  std::vector<RewardResult> score(RewardPool& reward, const std::vector<std::string>& completions) {
    std::vector<RewardRequest> requests;
    for (const std::string& completion : completions)
      requests.push_back({"the prompt", completion, &problem_});
    return reward.score_all(requests);
  }
  void expect_failure(const RewardResult& result, const std::string& message) {
    EXPECT_TRUE(result.failed);
    EXPECT_FALSE(result.valid);
    EXPECT_NE(result.message.find(message), std::string::npos)
        << "got: " << result.message << "\nexpected: " << message;
  }

  RewardSettings settings_;
  Problem problem_{"1", "", {}, "#### 4", {{"answer", "#### 4"}, {"level", 3}}};
};

TEST_F(HttpReward, PostsTheRequestAndReadsTheReply) {
  std::string head;
  Json request;
  const Endpoint endpoint([&](const Endpoint::Connection& connection) {
    head = connection.head;
    request = connection.request;
    connection.answer(R"({"reward": 0.25, "why": "unknown keys are ignored"})");
  });
  settings_.workers = 1;
  const auto reward = make_http_reward(endpoint.url("/score?strict=1"), settings_);
  const auto results = score(*reward, {"cut \xE2\x82"});
  EXPECT_EQ(results[0].reward, 0.25) << results[0].message;
  EXPECT_FALSE(results[0].failed);
  EXPECT_TRUE(head.starts_with("POST /score?strict=1 HTTP/1.1\r\n")) << head;
  EXPECT_NE(head.find(str("\r\nHost: 127.0.0.1:", endpoint.port(), "\r\n")), std::string::npos) << head;
  EXPECT_NE(head.find("\r\nContent-Type: application/json\r\n"), std::string::npos) << head;
  EXPECT_EQ(request["prompt"], "the prompt");
  EXPECT_EQ(request["completion"], "cut \xEF\xBF\xBD");
  EXPECT_EQ(request["answer"], "#### 4");
  EXPECT_EQ(request["fields"], Json({{"level", 3}}));
}

TEST_F(HttpReward, ReadsEveryFormOfAnswer) {
  const Endpoint endpoint([](const Endpoint::Connection& connection) {
    const std::string how = connection.request["completion"];
    const std::string body = str(R"({"id": )", connection.request["id"].get<int64_t>(), R"(, "reward": 2})");
    if (how == "length") connection.answer(body);
    if (how == "until close") connection.send("HTTP/1.0 200 OK\r\n\r\n" + body);
    if (how == "interim")
      connection.send("HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: " +
                      std::to_string(body.size()) + "\r\n\r\n" + body);
    if (how == "chunks")
      connection.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\n" + body.substr(0, 5) +
                      "\r\n" + str(std::hex, body.size() - 5) + "\r\n" + body.substr(5) +
                      "\r\n0\r\nX: y\r\n\r\n");
    if (how == "bytes")
      for (const char c : str("HTTP/1.1 200 OK\r\nContent-Length: ", body.size(), "\r\n\r\n", body)) {
        connection.send(std::string(1, c));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    if (how.size() > 1'000'000) connection.answer(str(R"({"reward": )", how.size(), "}"));
  });
  const auto reward = make_http_reward(endpoint.url(), settings_);
  const std::string large(5'000'000, 'x');
  const auto results = score(*reward, {"length", "until close", "interim", "chunks", "bytes", large});
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(results[i].reward, 2) << i << ": " << results[i].message;
  EXPECT_EQ(results[5].reward, 5e6) << results[5].message;
}

TEST_F(HttpReward, AnErrorOfTheEndpointFailsOnlyItsSample) {
  settings_.timeout_seconds = 2;
  const Endpoint endpoint([](const Endpoint::Connection& connection) {
    const std::string how = connection.request["completion"];
    const std::string ok = "HTTP/1.1 200 OK\r\n";
    if (how == "fine") connection.answer(R"({"reward": 0.5})");
    if (how == "error") connection.answer(R"({"error": "cannot parse the proof"})");
    if (how == "text") connection.answer("1.0 points");
    if (how == "nan") connection.answer(R"({"reward": NaN})");
    if (how == "null") connection.answer(R"({"reward": null})");
    if (how == "other id") connection.answer(R"({"id": 123456, "reward": 1})");
    if (how == "ready") connection.answer(R"({"ready": true})");
    if (how == "empty") connection.answer("", "204 No Content");
    if (how == "404") connection.answer("<h1>no such page</h1>", "404 Not Found");
    if (how == "307") connection.answer("", "307 Temporary Redirect");
    if (how == "500") connection.answer("Traceback", "500 Internal Server Error");
    if (how == "no http") connection.send("220 mail.example.org ESMTP\r\n\r\n");
    if (how == "silence") connection.send("");
    if (how == "half") connection.send(ok + "Content-Length: 100\r\n\r\n{\"reward\"");
    if (how == "hang") connection.wait_for_end();
    if (how == "trickle") {
      connection.send(ok);
      while (connection.send("X: y\r\n")) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    if (how == "endless") {
      connection.send(ok + "\r\n");
      while (connection.send(std::string(65536, 'x'))) {
      }
    }
    if (how == "endless head") {
      connection.send(ok);
      while (connection.send("X: " + std::string(60000, 'x') + "\r\n")) {
      }
    }
    if (how == "claims much") connection.send(ok + "Content-Length: 99999999999\r\n\r\n");
  });
  const auto reward = make_http_reward(endpoint.url(), settings_);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"error", "/score: cannot parse the proof"},
      {"text", "it answered '1.0 points', which is not a valid reply"},
      {"nan", "which is not a valid reply"},
      {"null", "it answered the reward 'null', expected a finite number"},
      {"other id", "unexpected reply (id 123456)"},
      {"ready", "which is not a valid reply"},
      {"empty", "it answered '', which is not a valid reply"},
      {"404", "the endpoint answered 404 Not Found: '<h1>no such page</h1>'"},
      {"307", "307 Temporary Redirect; redirects are not followed, give the final URL"},
      {"500", "the endpoint answered 500 Internal Server Error: 'Traceback'"},
      {"no http", "the endpoint's answer is not HTTP/1.1"},
      {"silence", "the endpoint closed the connection before its answer was complete"},
      {"half", "the endpoint closed the connection before its answer was complete"},
      {"hang", "no result within 2 s (timeout_seconds)"},
      {"trickle", "no result within 2 s (timeout_seconds)"},
      {"endless", "the endpoint's answer is longer than 1048576 bytes"},
      {"endless head", "the endpoint's answer is longer"},
      {"claims much", "the endpoint's answer is longer than 1048576 bytes"}};
  std::vector<std::string> completions;
  for (const auto& [how, message] : cases) completions.insert(completions.end(), {how, "fine"});
  const auto results = score(*reward, completions);
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(cases[i].first);
    expect_failure(results[2 * i], cases[i].second);
    EXPECT_EQ(results[2 * i + 1].reward, 0.5) << results[2 * i + 1].message;
  }
}

TEST_F(HttpReward, OnlyTransientFailuresAreRetried) {
  settings_.retries = 1;
  settings_.workers = 8;
  Mutex mutex;
  std::map<std::string, int> seen;
  const Endpoint endpoint([&](const Endpoint::Connection& connection) {
    const std::string how = connection.request["completion"];
    bool is_first = false;
    {
      const MutexLock lock(mutex);
      is_first = ++seen[how] == 1;
    }
    if (how == "down") return connection.answer("", "503 Service Unavailable");
    if (!is_first) return connection.answer(R"({"reward": 1})");
    if (how == "503") connection.answer("", "503 Service Unavailable");
    if (how == "429") connection.answer("", "429 Too Many Requests");
    if (how == "400") connection.answer("", "400 Bad Request");
    if (how == "error") connection.answer(R"({"error": "no"})");
    if (how == "garbage") connection.answer("garbage");
    if (how == "break") connection.send("HTTP/1.1 200 OK\r\nContent-Le");
  });
  const auto reward = make_http_reward(endpoint.url(), settings_);
  const auto results = score(*reward, {"503", "429", "break", "down", "400", "error", "garbage"});
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(results[i].reward, 1) << results[i].message;
  expect_failure(results[3], "503 Service Unavailable (attempt 2)");
  for (size_t i = 4; i < 7; ++i) EXPECT_TRUE(results[i].failed);
  for (const char* how : {"503", "429", "break", "down"}) EXPECT_EQ(seen[how], 2) << how;
  for (const char* how : {"400", "error", "garbage"}) EXPECT_EQ(seen[how], 1) << how;
  EXPECT_EQ(reward->num_retries(), 4);
}

TEST_F(HttpReward, AnEndpointThatGoesAndComesBack) {
  const auto answer = [](const Endpoint::Connection& connection) { connection.answer(R"({"reward": 1})"); };
  auto endpoint = std::make_unique<Endpoint>(answer);
  const uint16_t port = endpoint->port();
  const auto reward = make_http_reward(endpoint->url(), settings_);
  EXPECT_EQ(score(*reward, {"a"})[0].reward, 1);
  endpoint.reset();
  for (const RewardResult& result : score(*reward, {"b", "c", "d"}))
    expect_failure(result, "no connection: Connection refused");
  endpoint = std::make_unique<Endpoint>(answer, port);
  for (const RewardResult& result : score(*reward, {"e", "f", "g"}))
    EXPECT_EQ(result.reward, 1) << result.message;
}

TEST_F(HttpReward, WaitsForAnEndpointThatIsBeingStarted) {
  const auto answer = [](const Endpoint::Connection& connection) { connection.answer(R"({"reward": 1})"); };
  uint16_t port = 0;
  {
    const Endpoint reserved(answer);
    port = reserved.port();
  }
  std::unique_ptr<Endpoint> endpoint;
  std::thread starter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    endpoint = std::make_unique<Endpoint>(answer, port);
  });
  const auto reward = make_http_reward(str("http://127.0.0.1:", port), settings_);
  EXPECT_EQ(score(*reward, {"a"})[0].reward, 1);
  starter.join();
  reward->score_all({});
  endpoint.reset();
  settings_.startup_timeout_seconds = 0.5;
  try {
    make_http_reward(str("http://127.0.0.1:", port, "/score"), settings_);
    FAIL();
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("no connection within 0.5 s"), std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find("Connection refused"), std::string::npos) << error.what();
  }
}

TEST_F(HttpReward, CallsRunSideBySide) {
  // Each answer waits until eight requests have arrived.
  std::atomic<int> begun = 0;
  const Endpoint endpoint([&](const Endpoint::Connection& connection) {
    ++begun;
    while (begun < 8) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    connection.answer(str(R"({"reward": )", connection.request["completion"].get<std::string>(), "}"));
  });
  settings_.workers = 8;
  const auto reward = make_http_reward(endpoint.url(), settings_);
  std::vector<std::thread> callers;
  for (int t = 0; t < 2; ++t)
    callers.emplace_back([&, t] {
      std::vector<std::string> completions;
      for (int i = 0; i < 100; ++i) completions.push_back(std::to_string(100 * t + i));
      const auto results = score(*reward, completions);
      for (int i = 0; i < 100; ++i) EXPECT_EQ(results[i].reward, 100 * t + i) << results[i].message;
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(endpoint.num_requests(), 200);
}

TEST(HttpUrl, ReadsAndRefusesByName) {
  const auto parts = [](const std::string& url) {
    const HttpUrl parsed = parse_http_url(url);
    return str(parsed.host, "|", parsed.port, "|", parsed.target, "|", parsed.authority);
  };
  EXPECT_EQ(parts("http://judge:8000/score"), "judge|8000|/score|judge:8000");
  EXPECT_EQ(parts("http://judge"), "judge|80|/|judge");
  EXPECT_EQ(parts("http://judge?x=1#part"), "judge|80|/?x=1|judge");
  EXPECT_EQ(parts("http://[::1]:8000/a/b"), "::1|8000|/a/b|[::1]:8000");
  EXPECT_EQ(parts("http://[::1]/"), "::1|80|/|[::1]");
  const auto refused = [](const std::string& url, const std::string& part) {
    try {
      parse_http_url(url);
      ADD_FAILURE() << url;
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused("https://judge/score", "https is not supported");
  refused("ftp://judge", "expected http://HOST:PORT/PATH");
  refused("http://", "no host");
  refused("http://:80/", "no host");
  refused("http://judge:", "the port is not a number");
  refused("http://judge:70000", "the port is not a number");
  refused("http://judge:8o", "the port is not a number");
  refused("http://me:secret@judge/", "names and passwords");
  refused("http://judge/a b", "no spaces");
  refused("http://judge/\r\nX: y", "no spaces");
}

}  // namespace
}  // namespace bough

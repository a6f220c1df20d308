// The HTTP routes for trained agents, over sockets: AReaL's names, keys as sessions, retries, deadlines.
#include "serve/agent_server.h"

#include <gtest/gtest.h>

#include "base/mutex.h"
#include "serve/serve_test_util.h"

namespace bough {
namespace {

using testing::ScriptedEngine;

struct Answer {
  int status = 0;
  std::string head;
  Json body;
};

class AgentServerTest : public ::testing::Test, public ExternalRolloutSink {
 protected:
  void finished(FinishedGroup group) override {
    const MutexLock lock(mutex_);
    finished_.push_back(std::move(group));
  }
  void failed(uint64_t, const std::string& reason) override {
    const MutexLock lock(mutex_);
    failed_ = reason;
  }
  void wake() override {}

  void start(const AgentSessionsOptions& options, const std::string& key = "") {
    server_ = std::make_unique<AgentServer>(engine_, testing::byte_model(), key, options);
    const std::string url = server_->url();
    port_ = std::stoi(url.substr(url.rfind(':') + 1));
    server_->start(*this);
    engine_thread_ = std::thread([this] {
      while (!stops_)
        if (!server_->pass()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  void TearDown() override {
    stops_ = true;
    if (engine_thread_.joinable()) engine_thread_.join();
    if (server_) server_->close();
  }
  void offer(uint64_t id) { server_->offer({.id = id, .name = "p", .problem = &problem_}); }

  Answer ask(const std::string& path, const Json& body, const std::string& key = "",
             const std::string& header = "") {
    RawClient client(port_);
    const std::string text = body.is_null() ? "" : dump_line(body);
    client.send(str("POST ", path, " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n", header,
                    key.empty() ? "" : "Authorization: Bearer " + key + "\r\n",
                    "Content-Length: ", text.size(), "\r\n\r\n", text));
    const std::string answer = client.read_all();
    const size_t end = answer.find("\r\n\r\n");
    if (end == std::string::npos) return {};
    return {std::stoi(answer.substr(9, 3)), answer.substr(0, end),
            Json::parse(answer.substr(end + 4), nullptr, false)};
  }
  std::string session(const std::string& key = "") {
    const Answer started = ask("/rl/start_session", {{"task_id", "t"}}, key);
    EXPECT_EQ(started.status, 200) << started.body.dump();
    return started.body.value("api_key", "");
  }
  size_t num_finished() {
    const MutexLock lock(mutex_);
    return finished_.size();
  }
  std::string failed() {
    const MutexLock lock(mutex_);
    return failed_;
  }

  ScriptedEngine engine_{"Hello"};
  Problem problem_{.id = "p", .prompt = "Q", .messages = {}, .answer = "A"};
  std::unique_ptr<AgentServer> server_;
  std::thread engine_thread_;
  std::atomic<bool> stops_ = false;
  int port_ = 0;
  Mutex mutex_;
  std::vector<FinishedGroup> finished_ GUARDED_BY(mutex_);
  std::string failed_ GUARDED_BY(mutex_);
};

const Json kQuestion = {
    {"messages", {{{"role", "user"}, {"content", "Q"}}}}, {"temperature", 0}, {"seed", 4}};

TEST_F(AgentServerTest, AnEpisodeBecomesRows) {
  start({.group_size = 1});
  const Answer refused = ask("/rl/start_session", {{"task_id", "t"}});
  EXPECT_EQ(refused.status, 429);
  EXPECT_NE(refused.head.find("Retry-After: 1"), std::string::npos) << refused.head;
  offer(3);
  const Answer started = ask("/rl/start_session", {{"task_id", "t"}});
  EXPECT_EQ(started.body["session_id"], "t-3-0");
  EXPECT_EQ(started.body["problem"]["prompt"], "Q");
  const std::string key = started.body["api_key"];
  EXPECT_EQ(ask("/rl/set_reward", {{"reward", 1}}, key).status, 400) << "there is no answer yet";
  const Answer first = ask("/v1/chat/completions", kQuestion, key);
  ASSERT_EQ(first.status, 200) << first.body.dump();
  Json more = kQuestion;
  more["messages"].push_back(first.body["choices"][0]["message"]);
  more["messages"].push_back({{"role", "user"}, {"content", "R"}});
  more["return_token_ids"] = true;
  const Answer second = ask("/chat/completions", more, key);  // without /v1
  ASSERT_EQ(second.status, 200) << second.body.dump();
  EXPECT_EQ(ask("/v1/rl/set_reward", {{"reward", 0.5}, {"interaction_id", first.body["id"]}}, key).status,
            200);
  EXPECT_EQ(ask("/rl/set_reward", {{"reward", 2}, {"rewards", {{"form", 1}}}}, key).status, 200);
  EXPECT_EQ(ask("/rl/set_reward", {{"reward", 2}, {"interaction_id", "nobody's"}}, key).status, 404);
  for (const Json& bad : {Json(Json::object()), Json({{"reward", "1"}}), Json({{"reward", 1}, {"extra", 2}})})
    EXPECT_EQ(ask("/rl/set_reward", bad, key).status, 400) << bad.dump();
  const Answer ended = ask("/rl/end_session", nullptr, key);
  EXPECT_EQ(ended.body["interaction_count"], 2);
  ASSERT_EQ(num_finished(), 1u);
  ASSERT_EQ(finished_[0].samples.size(), 1u) << "one row: the second prompt begins with the first answer";
  const Trajectory& row = finished_[0].samples[0];
  EXPECT_EQ(row.turn_rewards, (std::vector<double>{0.5, 2}));
  EXPECT_EQ(row.reward, 2.5);
  EXPECT_EQ(row.num_generated(), 12);
  std::vector<int32_t> all = second.body["prompt_token_ids"],
                       sampled = second.body["choices"][0]["token_ids"];
  all.insert(all.end(), sampled.begin(), sampled.end());
  EXPECT_EQ(row.input_ids, all) << "what is trained is what was asked and answered";
  std::vector<uint8_t> earlier(row.loss_mask.begin(), row.loss_mask.end() - std::ssize(sampled));
  for (const char* path : {"/rl/end_session", "/rl/set_reward", "/v1/chat/completions"})
    EXPECT_EQ(ask(path, kQuestion, key).status, 410) << path;
  EXPECT_EQ(ask("/v1/messages", kQuestion, "sk-sess-of-another-run").status, 410);
  stops_ = true;
  engine_thread_.join();
  EXPECT_EQ(engine_.sampled, earlier) << "the second request marks the first answer's tokens";
}

TEST_F(AgentServerTest, AllApisRecordAndSamplingIsTheRuns) {
  start({.group_size = 1});
  offer(1);
  const std::string key = session();
  const auto with = [](Json body, const Json& more) {
    body.update(more);
    return body;
  };
  EXPECT_EQ(ask("/v1/messages", with(kQuestion, {{"model", "x"}, {"max_tokens", 9}}), key).status, 404)
      << "no such name";
  Json message = with(kQuestion, {{"model", "bytes"}, {"max_tokens", 9}});
  message.erase("seed");
  const Answer anthropic = ask("/v1/messages", message, key);
  ASSERT_EQ(anthropic.status, 200) << anthropic.body.dump();
  const Answer response = ask("/v1/responses", {{"input", "Q"}}, key);
  ASSERT_EQ(response.status, 200) << response.body.dump();
  const Answer completion = ask("/v1/completions", {{"prompt", "Q"}}, key);
  ASSERT_EQ(completion.status, 200) << completion.body.dump();
  EXPECT_EQ(ask("/v1/completions", {{"prompt", {"Q", "R"}}}, key).status, 400);
  EXPECT_EQ(ask("/v1/chat/completions", with(kQuestion, {{"n", 2}}), key).status, 400);
  for (const Answer& each : {anthropic, response, completion})
    EXPECT_EQ(ask("/rl/set_reward", {{"reward", 1}, {"interaction_id", each.body["id"]}}, key).status, 200);
  EXPECT_EQ(ask("/v1/chat/completions", kQuestion).status, 200) << "without a session: nobody who is trained";
  ask("/rl/end_session", Json::object(), key);
  ASSERT_EQ(num_finished(), 1u);
  EXPECT_EQ(finished_[0].samples.size(), 3u);
  EXPECT_EQ(finished_[0].samples[0].reward, 3);
  EXPECT_EQ(finished_[0].samples[0].temperature, 1.0) << "the run's, whatever a request says";
  EXPECT_EQ(server_->metrics().at("agents/requests_without_session"), 1);
}

TEST_F(AgentServerTest, ARetryIsTheSameInteractionAndADisconnectCancels) {
  start({.group_size = 1});
  offer(1);
  const std::string key = session();
  const Answer first = ask("/v1/chat/completions", kQuestion, key, "X-Stainless-Retry-Count: 0\r\n");
  const Answer again = ask("/v1/chat/completions", kQuestion, key, "X-Stainless-Retry-Count: 1\r\n");
  EXPECT_EQ(engine_.submitted, 1) << "it is answered again, not generated";
  EXPECT_EQ(again.body["choices"], first.body["choices"]);
  EXPECT_NE(again.body["id"], first.body["id"]);
  Json streamed = kQuestion;
  streamed["stream"] = true;
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(ask("/v1/chat/completions", streamed, key, "Idempotency-Key: k\r\n").status, 200);
  EXPECT_EQ(engine_.submitted, 2);
  ask("/v1/chat/completions", kQuestion, key);
  EXPECT_EQ(engine_.submitted, 3) << "an equal request is a sample of its own";

  // A request that is being answered is abandoned when its retry arrives.
  engine_.is_open = false;
  RawClient gone(port_);
  Json other = kQuestion;
  other["messages"][0]["content"] = "R";
  const std::string text = dump_line(other);
  gone.send(str("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ", key,
                "\r\nContent-Length: ", text.size(), "\r\n\r\n", text));
  ASSERT_TRUE(eventually([&] { return engine_.submitted == 4; }));
  std::thread opens([&] {
    EXPECT_TRUE(eventually([&] { return engine_.cancelled == 1; }));
    engine_.is_open = true;
  });
  EXPECT_EQ(ask("/v1/chat/completions", other, key, "X-Stainless-Retry-Count: 2\r\n").status, 200);
  opens.join();
  EXPECT_NE(gone.read_until("}").find("409"), std::string::npos);

  engine_.is_open = false;
  other["messages"][0]["content"] = "S";
  RawClient leaves(port_);
  const std::string last = dump_line(other);
  leaves.send(str("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ", key,
                  "\r\nContent-Length: ", last.size(), "\r\n\r\n", last));
  ASSERT_TRUE(eventually([&] { return engine_.submitted == 6; }));
  leaves.close();
  EXPECT_TRUE(eventually([&] { return engine_.cancelled == 2; }));
  engine_.is_open = true;
  EXPECT_EQ(ask("/rl/set_reward", {{"reward", 1}, {"interaction_id", again.body["id"]}}, key).status, 200);
  EXPECT_EQ(ask("/rl/end_session", nullptr, key).body["interaction_count"], 4);
}

TEST_F(AgentServerTest, AtItsDeadlineASessionIsToldAndItsRequestsEnd) {
  start({.group_size = 2, .lease_seconds = 0.3});
  offer(1);
  const std::string key = session();
  engine_.is_open = false;
  const Answer cut = ask("/v1/chat/completions", kQuestion, key);
  EXPECT_EQ(cut.status, 410) << cut.body.dump();
  EXPECT_EQ(cut.body["error"]["code"], "session_ended");
  EXPECT_TRUE(eventually([&] { return engine_.cancelled == 1 && failed() == "lease expired"; }));
  EXPECT_EQ(server_->waits_for(), "");
  engine_.is_open = true;
}

TEST_F(AgentServerTest, AKeyProtectsEverythingOutsideSessions) {
  start({.group_size = 1}, "secret");
  offer(1);
  EXPECT_EQ(ask("/rl/start_session", {{"task_id", "t"}}).status, 401);
  EXPECT_EQ(ask("/v1/chat/completions", kQuestion, "guess").status, 401);
  const std::string key = session("secret");
  EXPECT_EQ(ask("/v1/chat/completions", kQuestion, key).status, 200);
  EXPECT_EQ(ask("/rl/start_session", {{"task_id", "t"}}, key).status, 401) << "a session's key starts none";
}

TEST_F(AgentServerTest, WhenTheRunEndsEverybodyIsTold) {
  start({.group_size = 1});
  offer(1);
  const std::string key = session();
  engine_.is_open = false;
  std::thread closes([&] {
    EXPECT_TRUE(eventually([&] { return engine_.submitted == 1; }));
    server_->close();
  });
  EXPECT_EQ(ask("/v1/chat/completions", kQuestion, key).status, 503);
  closes.join();
  engine_.is_open = true;
  EXPECT_EQ(num_finished(), 0u);
}

}  // namespace
}  // namespace bough

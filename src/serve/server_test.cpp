#include "serve/server.h"

#include <gtest/gtest.h>

#include "serve/serve_test_util.h"

namespace bough {
namespace {

using testing::ScriptedEngine;

class ServerTest : public ::testing::Test {
 protected:
  void start(const std::string& text = "Hello", ServeSettings settings = {}, const std::string& key = "") {
    engine_ = std::make_unique<ScriptedEngine>(text);
    server_ = std::make_unique<Server>(*engine_, testing::byte_model(std::move(settings)), key);
    const std::string url = server_->url();
    port_ = std::stoi(url.substr(url.rfind(':') + 1));
    thread_ = std::thread([this] {
      try {
        server_->run([this] { return stops_.load(); });
      } catch (const IoError& error) {
        failure_ = error.what();
      }
    });
  }
  void stop() {
    stops_ = true;
    if (thread_.joinable()) thread_.join();
  }
  void TearDown() override { stop(); }

  std::string ask(const std::string& path, const std::string& body, const std::string& header = "") const {
    RawClient client(port_);
    client.send(str("POST ", path, " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n", header,
                    "Content-Length: ", body.size(), "\r\n\r\n", body));
    return client.read_all();
  }
  std::string metric(const std::string& name) const {
    RawClient client(port_);
    client.send("GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    const std::string text = client.read_all();
    const size_t at = text.find("\nbough_serve_" + name + " ");
    if (at == std::string::npos) return "";
    const size_t begin = text.find(' ', at) + 1;
    return text.substr(begin, text.find('\n', begin) - begin);
  }

  std::unique_ptr<ScriptedEngine> engine_;
  std::unique_ptr<Server> server_;
  std::thread thread_;
  std::atomic<bool> stops_ = false;
  std::string failure_;
  int port_ = 0;
};

const std::string kChat = R"({"messages": [{"role": "user", "content": "Q"}])";

TEST_F(ServerTest, Answers) {
  start();
  const std::string answer = ask("/v1/chat/completions", kChat + "}");
  EXPECT_NE(answer.find("HTTP/1.1 200"), std::string::npos) << answer;
  EXPECT_NE(answer.find(R"("content":"Hello")"), std::string::npos) << answer;
  EXPECT_NE(answer.find(R"("completion_tokens":6)"), std::string::npos) << answer;
  EXPECT_NE(answer.find("Request-Id: req_"), std::string::npos) << answer;
}

TEST_F(ServerTest, GenerationStopsAfterTheOnlyCall) {
  ServeSettings settings;
  settings.tool_call_parser = "hermes";
  start(R"(<tool_call>{"name": "f", "arguments": {}}</tool_call>)" + std::string(100000, 'x'), settings);
  const std::string tools =
      R"(, "tools": [{"type": "function", "function": {"name": "f"}}], "max_tokens": 100000)";
  for (const char* stream : {"", R"(, "stream": true)"}) {
    const std::string answer = ask(
        "/v1/chat/completions", kChat + tools + R"(, "parallel_tool_calls": false, "n": 2)" + stream + "}");
    EXPECT_NE(answer.find(R"("finish_reason":"tool_calls")"), std::string::npos) << answer;
    EXPECT_EQ(answer.find("xx"), std::string::npos);
  }
  EXPECT_TRUE(eventually([&] { return engine_->cancelled == 2; }));
  EXPECT_TRUE(eventually([&] { return metric("requests_in_flight") == "0"; }));
}

TEST_F(ServerTest, AClientThatGoesAwayIsCancelledInTheEngine) {
  start(std::string(100000, 'x'));
  RawClient streaming(port_), waiting(port_);
  streaming.post("/v1/chat/completions", kChat + R"(, "stream": true, "n": 3, "max_tokens": 100000})");
  streaming.read_until("\"content\":\"x\"");
  engine_->is_open = false;
  waiting.post("/v1/completions", R"({"prompt": ["a", "b"], "max_tokens": 100000})");
  ASSERT_TRUE(eventually([&] { return engine_->submitted == 3; }));
  streaming.close();
  waiting.close();
  EXPECT_TRUE(eventually([&] { return engine_->in_flight == 0; }));
  EXPECT_EQ(engine_->cancelled, 3);
  EXPECT_TRUE(eventually([&] { return metric("requests_in_flight") == "0"; }));
}

TEST_F(ServerTest, AClientThatDoesNotReadIsCancelledToo) {
  ServeSettings settings;
  settings.http.max_unsent = {20000};
  start(std::string(1 << 19, 'x'), settings);
  RawClient slow(port_, /*receive_buffer=*/4096);
  slow.post("/v1/chat/completions", kChat + R"(, "stream": true, "max_tokens": 1000000})");
  EXPECT_TRUE(eventually([&] { return engine_->cancelled == 1; }));
  EXPECT_EQ(metric("clients_cut_off_total"), "1");
}

TEST_F(ServerTest, ARequestThatTheEngineRefusesIsABadRequest) {
  start();
  for (const char* stream : {"", R"(, "stream": true)"}) {
    const std::string answer =
        ask("/v1/completions", str(R"({"prompt": ["a", "X", "b"], "max_tokens": 5)", stream, "}"));
    EXPECT_NE(answer.find("HTTP/1.1 400"), std::string::npos) << answer;
    EXPECT_NE(answer.find(R"("message":"no X")"), std::string::npos) << answer;
  }
  EXPECT_TRUE(eventually([&] { return engine_->in_flight == 0; }));
}

TEST_F(ServerTest, BoundsTheRequestsInFlight) {
  ServeSettings settings;
  settings.max_requests = 1;
  start("Hello", settings);
  engine_->is_open = false;
  RawClient first(port_);
  first.post("/v1/chat/completions", kChat + "}");
  ASSERT_TRUE(eventually([&] { return engine_->submitted == 1; }));
  const std::string answer = ask("/v1/messages", "{}");
  EXPECT_NE(answer.find("HTTP/1.1 429"), std::string::npos) << answer;
  EXPECT_NE(answer.find("Retry-After: 1"), std::string::npos) << answer;
  EXPECT_NE(answer.find("rate_limit_error"), std::string::npos) << answer;
  engine_->is_open = true;
  EXPECT_NE(first.read_until("\"usage\"").find("200 OK"), std::string::npos);
}

TEST_F(ServerTest, AnEngineThatFailsIsTold) {
  start(std::string(1 << 20, 'x'));
  RawClient streaming(port_), waiting(port_);
  streaming.post("/v1/messages", kChat + R"(, "model": "bytes", "stream": true, "max_tokens": 1000000})");
  streaming.read_until("text_delta");
  engine_->is_open = false;
  waiting.post("/v1/chat/completions", kChat + R"(, "max_tokens": 1000000})");
  ASSERT_TRUE(eventually([&] { return engine_->submitted == 2; }));
  engine_->fails = true;
  EXPECT_NE(streaming.read_all().find("event: error\ndata: {\"error\":{\"message\":\"the engine failed"),
            std::string::npos);
  EXPECT_NE(waiting.read_all().find("HTTP/1.1 500"), std::string::npos);
  thread_.join();
  EXPECT_EQ(failure_, "the engine broke");
}

TEST_F(ServerTest, StoppingLetsRequestsFinish) {
  start();
  engine_->is_open = false;
  RawClient running(port_);
  running.post("/v1/chat/completions", kChat + R"(, "stream": true})");
  running.read_until("assistant");
  stops_ = true;
  engine_->is_open = true;
  EXPECT_TRUE(running.read_all().ends_with("data: [DONE]\n\n\r\n0\r\n\r\n"));
  thread_.join();
}

TEST_F(ServerTest, StoppingTellsThoseWhoAreNotDoneInTime) {
  ServeSettings settings;
  settings.shutdown_seconds = 0.05;
  start("Hello", settings);
  engine_->is_open = false;
  RawClient streaming(port_), waiting(port_);
  streaming.post("/v1/chat/completions", kChat + R"(, "stream": true})");
  streaming.read_until("assistant");
  waiting.post("/v1/completions", R"({"prompt": "a"})");
  ASSERT_TRUE(eventually([&] { return engine_->submitted == 2; }));
  stops_ = true;
  EXPECT_NE(streaming.read_all().find("the server is shutting down"), std::string::npos);
  EXPECT_NE(waiting.read_all().find("HTTP/1.1 503"), std::string::npos);
  thread_.join();
}

TEST_F(ServerTest, AsksForTheKey) {
  EXPECT_THROW(Server(*std::make_unique<ScriptedEngine>(""), testing::byte_model([] {
                 ServeSettings settings;
                 settings.host = "0.0.0.0";
                 return settings;
               }()),
                      ""),
               UserError);
  start("Hello", {}, "secret");
  const std::string body = kChat + "}";
  for (const char* header : {"", "Authorization: Bearer secreT\r\n", "Authorization: Bearer secretsecret\r\n",
                             "Authorization: Bearer \r\n", "x-api-key: s\r\n"})
    EXPECT_NE(ask("/v1/chat/completions", body, header).find("HTTP/1.1 401"), std::string::npos) << header;
  for (const char* header : {"Authorization: Bearer secret\r\n", "x-api-key: secret\r\n"})
    EXPECT_NE(ask("/v1/chat/completions", body, header).find("HTTP/1.1 200"), std::string::npos) << header;
}

TEST_F(ServerTest, WithoutAKeyPagesOfOtherMachinesAreRefused) {
  start();
  const std::string body = kChat + "}";
  EXPECT_NE(ask("/v1/chat/completions", body, "Origin: https://example.org\r\n").find("HTTP/1.1 403"),
            std::string::npos);
  EXPECT_NE(ask("/v1/chat/completions", body, "Origin: http://localhost:3000\r\n").find("HTTP/1.1 200"),
            std::string::npos);
  RawClient rebound(port_);
  rebound.send("GET /v1/models HTTP/1.1\r\nHost: example.org:8000\r\nConnection: close\r\n\r\n");
  EXPECT_NE(rebound.read_all().find("HTTP/1.1 403"), std::string::npos);
}

TEST_F(ServerTest, BadRequestsHaveTheShapeOfTheirApi) {
  start();
  EXPECT_NE(ask("/v1/chat/completions", "{").find("HTTP/1.1 400"), std::string::npos);
  EXPECT_NE(ask("/v1/chat/completions", "[]").find(R"("type":"invalid_request_error")"), std::string::npos);
  EXPECT_NE(ask("/v1/messages", "{}").find(R"("type":"error")"), std::string::npos);
  EXPECT_NE(ask("/nothing", "{}").find("HTTP/1.1 404"), std::string::npos);
  EXPECT_NE(ask("/health", "{}").find("HTTP/1.1 405"), std::string::npos);
  EXPECT_NE(ask("/v1/completions", R"({"prompt": [1, 259]})").find("HTTP/1.1 400"), std::string::npos);
  EXPECT_NE(ask("/v1/completions", R"({"prompt": ")" + std::string("\xFF") + R"("})").find("HTTP/1.1 400"),
            std::string::npos);
  EXPECT_NE(ask("/v1/completions", std::string(100000, '[')).find("HTTP/1.1 400"), std::string::npos);
  EXPECT_EQ(engine_->submitted, 0);
}

}  // namespace
}  // namespace bough

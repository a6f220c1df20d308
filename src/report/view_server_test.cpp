#include "report/view_server.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/base_test_util.h"
#include "base/error.h"
#include "base/file.h"
#include "net/http_server.h"
#include "net/net_test_util.h"
#include "report/html_text.h"
#include "report/run_control.h"
#include "report/run_page.h"

namespace bough {
namespace {

const std::string kAttack = "\"'></pre></script><script>alert(1)</script><!--<img src=x onerror=alert(1)>";

class ViewServerTest : public ::testing::Test {
 protected:
  ViewServerTest() {
    add_step(1);
    server_ = std::make_unique<ViewServer>(
        std::vector<ViewedRun>{{.folder = folder_.path(),
                                .about = {{"config", "seed: 1"}},
                                .step = [](int64_t step, int64_t first) -> Json {
                                  if (step != 1) throw UserError(str("no step ", step));
                                  return {{"step", step}, {"first", first}, {"text", kAttack}};
                                }}},
        0);
    const std::string url = server_->url();
    port_ = std::stoi(url.substr(url.rfind(':') + 1));
  }
  void add_step(int64_t step, const std::string& more = "") {
    std::ofstream(folder_.path() / "metrics.jsonl", std::ios::app)
        << str("{\"step\":", step, ",\"reward/mean\":0.5", more, "}\n");
  }
  std::string get(const std::string& target, const std::string& headers = "Host: localhost\r\n",
                  const std::string& method = "GET") const {
    RawClient client(port_);
    client.send(method + " " + target + " HTTP/1.1\r\n" + headers + "Connection: close\r\n\r\n");
    return client.read_all();
  }
  static Json body_of(const std::string& answer) {
    return Json::parse(answer.substr(answer.find("\r\n\r\n") + 4));
  }

  TemporaryFolder folder_;
  std::unique_ptr<ViewServer> server_;
  int port_ = 0;
};

TEST_F(ViewServerTest, ServesThePageAndTheRun) {
  const std::string page = get("/");
  EXPECT_NE(page.find("HTTP/1.1 200"), std::string::npos);
  EXPECT_NE(page.find("text/html"), std::string::npos);
  EXPECT_NE(page.find("id=\"data\">null</script>"), std::string::npos);
  const Json snapshot = body_of(get("/api/snapshot"));
  EXPECT_EQ(snapshot["runs"].size(), 1u);
  EXPECT_EQ(snapshot["runs"][0]["config"], "seed: 1");
  EXPECT_EQ(snapshot["runs"][0]["curves"]["reward/mean"]["steps"], Json::array({1}));
  EXPECT_EQ(body_of(get("/api/step?run=0&step=1&first=2"))["first"], 2);
  EXPECT_NE(get("/api/step?run=0&step=3").find("HTTP/1.1 404"), std::string::npos);
  EXPECT_NE(get("/api/step?run=9&step=1").find("HTTP/1.1 400"), std::string::npos);
  EXPECT_NE(get("/api/step?run=x").find("HTTP/1.1 400"), std::string::npos);
  EXPECT_NE(get("/metrics").find("\n# TYPE bough_step gauge\nbough_step{run="), std::string::npos);
  EXPECT_NE(get("/metrics").find("bough_reward_mean{run=\""), std::string::npos);
}

TEST_F(ViewServerTest, AnswersOnlyThisMachineAndChangesNothing) {
  EXPECT_NE(get("/", "Host: example.org\r\n").find("HTTP/1.1 403"), std::string::npos);
  EXPECT_NE(get("/", "Host: localhost\r\nOrigin: http://example.org\r\n").find("HTTP/1.1 403"),
            std::string::npos);
  EXPECT_NE(get("/", "Host: localhost\r\nOrigin: null\r\n").find("HTTP/1.1 403"), std::string::npos);
  EXPECT_NE(get("/", "Host: 127.0.0.1:80\r\n").find("HTTP/1.1 200"), std::string::npos);
  EXPECT_NE(get("/", "Host: localhost\r\n", "DELETE").find("HTTP/1.1 405"), std::string::npos);
  EXPECT_NE(get("/../etc/passwd").find("HTTP/1.1 404"), std::string::npos);
  EXPECT_EQ(get("/api/snapshot").find("Access-Control"), std::string::npos);
}

TEST_F(ViewServerTest, AStreamGoesOnWhereTheSnapshotEnds) {
  RawClient client(port_);
  client.send("GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n");
  client.read_until("text/event-stream");
  add_step(2);
  const Json snapshot = body_of(get("/api/snapshot"));
  EXPECT_EQ(snapshot["runs"][0]["curves"]["reward/mean"]["steps"], Json::array({1, 2}));
  const int64_t serial = snapshot["serial"];
  EXPECT_NE(client.read_until("\n\n").find(str("id: ", serial, "\n")), std::string::npos)
      << "the snapshot contains the event";
  add_step(3);
  const std::string event = client.read_until("\n\n");
  EXPECT_NE(event.find(str("id: ", serial + 1, "\n")), std::string::npos);
  EXPECT_NE(event.find("\"step\":3"), std::string::npos);
}

TEST_F(ViewServerTest, AReaderThatStopsReadingIsDropped) {
  RawClient client(port_, /*receive_buffer=*/4096);
  client.send("GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n");
  client.read_until("text/event-stream");
  get("/api/snapshot");  // answered after the stream is open; what was written before is not sent
  constexpr int64_t kSteps = 200, kBytes = 100'000;
  const std::string more = ",\"" + std::string(kBytes, 'x') + "\":1";
  for (int64_t step = 2; step < kSteps; ++step) add_step(step, more);
  EXPECT_TRUE(eventually([&] { return body_of(get("/api/snapshot"))["serial"].get<int64_t>() >= 198; }));
  EXPECT_LT(client.read_all().size(), kSteps * kBytes / 2);
}

TEST_F(ViewServerTest, ACommandNeedsTheTokenAndALiveRun) {
  const std::string target = "/api/control?run=0&command=pause", host = "Host: localhost\r\n";
  const std::string url = server_->url_with_token();
  const std::string token = "X-Bough-Token: " + url.substr(url.rfind('=') + 1) + "\r\n";
  const auto status = [&](const std::string& headers, const std::string& method = "POST") {
    return get(target, headers, method).substr(9, 3);
  };
  EXPECT_EQ(status(host), "403") << "no token";
  EXPECT_EQ(status(host + token.substr(0, token.size() - 3) + "\r\n"), "403") << "a part of the token";
  EXPECT_EQ(status("Host: example.org\r\n" + token), "403");
  EXPECT_EQ(status(host + "Origin: http://example.org\r\n" + token), "403");
  EXPECT_EQ(status(host + token, "GET"), "405");
  EXPECT_EQ(status(host + token), "409") << "the run is not alive";
  clear_control_folder(folder_.path());
  const FolderLock lock(folder_.path());
  const SteadyClock clock;
  ControlQueue queue(folder_.path(), clock);
  RawClient client(port_);
  client.send("POST " + target + " HTTP/1.1\r\n" + host + token + "Connection: close\r\n\r\n");
  std::vector<ControlQueue::Request> requests;
  EXPECT_TRUE(eventually([&] { return !(requests = queue.take()).empty(); }));
  ASSERT_EQ(requests.size(), 1u);
  EXPECT_EQ(requests[0].command, "pause");
  queue.answer(requests[0].id, {.done = true, .text = "paused after step 3"});
  const std::string answer = client.read_all();
  EXPECT_EQ(answer.substr(9, 3), "200");
  EXPECT_EQ(body_of(answer)["text"], "paused after step 3");
  EXPECT_EQ(answer.find("Access-Control"), std::string::npos);
}

TEST_F(ViewServerTest, AChatIsPassedToTheRunsServerWithItsKey) {
  const std::string host = "Host: localhost\r\n", url = server_->url_with_token();
  const std::string token = "X-Bough-Token: " + url.substr(url.rfind('=') + 1) + "\r\n";
  const auto chat = [&](const std::string& headers, const std::string& body) {
    RawClient client(port_);
    client.send(str("POST /api/chat?run=0 HTTP/1.1\r\n", host, headers, "Content-Length: ", body.size(),
                    "\r\nConnection: close\r\n\r\n", body));
    return client.read_all();
  };
  const auto error_of = [](const std::string& answer) { return body_of(answer)["error"].get<std::string>(); };
  const std::string body = "{\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}]}";
  EXPECT_EQ(chat("", body).substr(9, 3), "403") << "no token";
  EXPECT_NE(error_of(chat(token, "{\"messages\":[],\"n\":9}")).find("expected {\"messages\""),
            std::string::npos);
  EXPECT_EQ(error_of(chat(token, body)), "the run is not alive");
  clear_control_folder(folder_.path());
  const FolderLock lock(folder_.path());
  EXPECT_NE(error_of(chat(token, body)).find("serve.port"), std::string::npos);

  std::string key;
  Json request;
  HttpServer model(
      {.host = "127.0.0.1", .error_body = [](int, const std::string&, const std::string&) { return "{}"; }},
      [&](const HttpRequest& got, const std::shared_ptr<HttpExchange>& exchange) {
        key = got.header("authorization");
        request = Json::parse(got.body);
        if (request["messages"].size() > 1)
          return exchange->respond({.status = 429, .body = R"({"error":{"message":"too many"}})"});
        exchange->begin_stream({});
        exchange->write("data: {\"part\":1}\n\n");
        exchange->write("data: [DONE]\n\n");
        exchange->finish();
      });
  write_file_atomically(control_file(folder_.path(), kModelServer),
                        dump_line({{"url", model.url()}, {"api_key", "secret"}}));
  const std::string answer = chat(token, body);
  EXPECT_EQ(answer.substr(9, 3), "200");
  EXPECT_NE(answer.find("data: {\"part\":1}\n\ndata: [DONE]"), std::string::npos);
  EXPECT_EQ(answer.find("Access-Control"), std::string::npos);
  EXPECT_EQ(key, "Bearer secret");
  EXPECT_EQ(request["stream"], true);
  EXPECT_EQ(request["messages"][0]["content"], "hello");
  EXPECT_EQ(error_of(chat(token, "{\"messages\":[{},{}]}")), "too many") << "the server's own words";
  model.close();
  EXPECT_NE(error_of(chat(token, body)).find("no connection"), std::string::npos);
}

TEST(RunPage, DataCannotEndTheirElementOrBecomeMarkup) {
  const Json data = {{"title", kAttack}};
  const std::string page = run_page(kAttack, &data), harmless = run_page("title", nullptr);
  const auto count = [](const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
    return n;
  };
  for (const char* part : {"<script", "</script", "<img", "<!--"})
    EXPECT_EQ(count(page, part), count(harmless, part)) << part;
  const size_t begin = page.find("id=\"data\">") + 10;
  EXPECT_EQ(Json::parse(page.substr(begin, page.find("</script>", begin) - begin)), data);
}

TEST(RunPage, LoadsNothingAndNamesNoInnerHtml) {
  const std::string page = run_page("title", nullptr);
  for (const char* part : {" src=", "href=\"http", "url(", "@import", "<link", "<iframe",
                           "innerHTML =", "insertAdjacentHTML", "document.write", "eval("})
    EXPECT_EQ(page.find(part), std::string::npos) << part;
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  EXPECT_NE(run_page("title", nullptr), page) << "the nonce is random";
}

TEST(HtmlText, IsEscapedAndCutAtWholeCharacters) {
  EXPECT_EQ(html_escape("a<b>&\"'\n\x01\x7f\xff"), "a&lt;b&gt;&amp;&quot;&#39;\n\u2401\u2421\uFFFD");
  EXPECT_EQ(cut_text("aé", 2), "a…");
  EXPECT_EQ(cut_text("aé", 3), "aé");
}

}  // namespace
}  // namespace bough

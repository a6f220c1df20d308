#include "net/http_server.h"

#include <gtest/gtest.h>

#include <optional>
#include <sstream>

#include "net/net_test_util.h"

namespace bough {
namespace {

// The handler answers with the method, the path and the body's length. For /stream it writes until the client
// closes the connection.
class HttpServerTest : public ::testing::Test {
 protected:
  void start(HttpLimits limits = {}) {
    server_ = std::make_unique<HttpServer>(
        HttpServerOptions{.host = "127.0.0.1",
                          .limits = limits,
                          .error_body = [](int status, const std::string&,
                                           const std::string& path) { return str("error ", status, path); }},
        [this](const HttpRequest& request, const std::shared_ptr<HttpExchange>& exchange) {
          ++requests_;
          if (body_)
            return exchange->respond(
                {.stream = std::make_shared<std::istringstream>(*body_), .stream_bytes = declared_});
          if (request.path != "/stream")
            return exchange->respond({.body = str(request.method, request.path, request.body.size())});
          exchange->on_gone([this] { ++gone_; });
          exchange->begin_stream({});
          exchange->write("data: begun\n\n");
          stream_ = exchange;
        });
  }
  void TearDown() override {
    server_->close(0);
    stream_ = {};  // its socket belongs to the server
  }
  static std::string get(const std::string& path) { return "GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n"; }
  void write_stream(const std::string& text, bool last = false) {
    server_->post([this, text, last] {
      stream_->write(text);
      if (last) stream_->finish();
    });
  }

  std::unique_ptr<HttpServer> server_;
  std::shared_ptr<HttpExchange> stream_;
  std::optional<std::string> body_;  // if set, each answer's body is a stream of it
  int64_t declared_ = 0;             // the length that the answer names
  std::atomic<int64_t> requests_ = 0, gone_ = 0;
};

TEST_F(HttpServerTest, OneConnectionServesRequestsThatCameTogether) {
  start();
  RawClient client(server_->port());
  client.send(get("/a?b=c") + "POST /d HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n" +
              get("/e"));
  EXPECT_NE(client.read_until("GET/a0").find("HTTP/1.1 200 OK\r\n"), std::string::npos);
  client.read_until("POST/d3");
  client.read_until("GET/e0");
  EXPECT_EQ(requests_, 3);
}

TEST_F(HttpServerTest, HeadHasNoBodyAndVersion10Closes) {
  start();
  RawClient client(server_->port());
  client.send("HEAD /a HTTP/1.0\r\n\r\n");
  const std::string answer = client.read_all();
  EXPECT_TRUE(answer.ends_with("\r\n\r\n")) << answer;
  EXPECT_NE(answer.find("Content-Length: 7"), std::string::npos) << answer;
}

TEST_F(HttpServerTest, ABodyFromAStreamArrivesWholeAndTheConnectionGoesOn) {
  body_.emplace();
  for (size_t i = 0; i < 3'000'000; ++i) *body_ += static_cast<char>('a' + i % 23);
  declared_ = std::ssize(*body_);
  start({.max_unsent = {1 << 20}});  // which bounds streams of events only
  RawClient client(server_->port());
  for (int i = 0; i < 2; ++i) {
    client.send(get("/file"));
    EXPECT_NE(client.read_until("\r\n\r\n").find("Content-Length: 3000000\r\n"), std::string::npos);
    EXPECT_TRUE(client.read_until(*body_) == *body_);
  }
  client.send("HEAD /file HTTP/1.0\r\n\r\n");
  EXPECT_TRUE(client.read_all().ends_with("\r\n\r\n"));
}

TEST_F(HttpServerTest, AStreamThatEndsEarlyEndsTheConnection) {
  body_ = std::string(400'000, 'x');
  declared_ = 600'000;
  start();
  RawClient client(server_->port());
  client.send(get("/file"));
  client.read_until("\r\n\r\n");
  EXPECT_LT(client.read_all().size(), 600'000U);
}

TEST(ParseQuery, DecodesNamesAndValues) {
  const HttpHeaders expected = {
      {"limit", "5"}, {"a b", "c&d e"}, {"empty", ""}, {"bad", "%zz%4"}, {"x", "=y"}};
  EXPECT_EQ(parse_query("limit=5&&a+b=c%26d%20e&empty&bad=%zz%4&x==y"), expected);
  EXPECT_EQ(parse_query(""), HttpHeaders());
}

TEST_F(HttpServerTest, AnswersRequestsThatAreNotHttp) {
  start();
  for (const std::string text :
       {"\x16\x03\x01\x02\r\n\r\n", "GET\r\n\r\n", "POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnothing\r\n"}) {
    RawClient client(server_->port());
    client.send(text);
    EXPECT_NE(client.read_all().find("error 400"), std::string::npos) << text;
  }
  EXPECT_EQ(requests_, 0);
  EXPECT_EQ(server_->statistics().malformed, 4);
}

TEST_F(HttpServerTest, BoundsBodiesWhateverTheirEncoding) {
  start({.max_body = {2000}, .max_header = {1024}});
  RawClient announced(server_->port());
  announced.send("POST /a HTTP/1.1\r\nContent-Length: 2001\r\n\r\n");
  EXPECT_NE(announced.read_all().find("error 413/a"), std::string::npos);

  const std::string begin = "POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
  RawClient huge(server_->port());  // a gigabyte in one chunk
  huge.send(begin + "40000000\r\n" + std::string(5000, 'x'));
  EXPECT_NE(huge.read_all().find("error 413/a"), std::string::npos);

  RawClient many(server_->port());
  many.send(begin);
  bool goes_on = true;
  for (int i = 0; i < 30 && goes_on; ++i) goes_on = many.send("64\r\n" + std::string(100, 'x') + "\r\n");
  EXPECT_NE(many.read_all().find("error 413/a"), std::string::npos);

  RawClient begun(server_->port());  // sends a part of the body together with the header
  begun.send("POST /a HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n" + std::string(500, 'x'));
  EXPECT_NE(begun.read_all().find("error 413/a"), std::string::npos);

  RawClient extension(server_->port());  // a chunk extension that never ends
  extension.send(begin + "1;" + std::string(4000, 'x'));
  EXPECT_NE(extension.read_all().find("error 4"), std::string::npos);

  RawClient header(server_->port());
  header.send("GET /a HTTP/1.1\r\nA: " + std::string(2000, 'x'));
  EXPECT_NE(header.read_all().find("error 431"), std::string::npos);

  RawClient fits(server_->port());
  fits.send("POST /a HTTP/1.1\r\nContent-Length: 2000\r\n\r\n" + std::string(2000, 'x'));
  EXPECT_NE(fits.read_until("POST/a2000").find("200 OK"), std::string::npos);
  EXPECT_EQ(requests_, 1);
}

TEST_F(HttpServerTest, BoundsTheBytesOfAllBodiesTogether) {
  start({.max_body = {100000}, .max_buffered = {10000}});
  const std::string begin = "POST /a HTTP/1.1\r\nContent-Length: 8000\r\n\r\n";
  RawClient first(server_->port()), second(server_->port());
  first.send(begin + std::string(7000, 'x'));
  // The pause lets the server read the first body before the second, which then exceeds max_buffered.
  first.send("");
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  second.send(begin + std::string(7000, 'x'));
  EXPECT_NE(second.read_all().find("error 503/a"), std::string::npos);
  first.send(std::string(1000, 'x'));
  EXPECT_NE(first.read_until("POST/a8000").find("200 OK"), std::string::npos);
  RawClient third(server_->port());
  third.send(begin + std::string(8000, 'x'));
  EXPECT_NE(third.read_until("POST/a8000").find("200 OK"), std::string::npos);
}

TEST_F(HttpServerTest, BoundsTheTimeOfEachPart) {
  start({.header_timeout_seconds = 0.5, .body_timeout_seconds = 0.5, .idle_timeout_seconds = 0.5});
  RawClient silent(server_->port());
  EXPECT_EQ(silent.read_all(), "");
  RawClient header(server_->port());
  header.send("GET /a HT");
  EXPECT_NE(header.read_all().find("error 408"), std::string::npos);
  RawClient body(server_->port());
  body.send("POST /a HTTP/1.1\r\nContent-Length: 5\r\n\r\nabc");
  EXPECT_NE(body.read_all().find("error 408/a"), std::string::npos);
  RawClient idle(server_->port());
  idle.send(get("/a"));
  EXPECT_TRUE(idle.read_all().ends_with("GET/a0"));
  EXPECT_TRUE(eventually([&] { return server_->statistics().connections == 0; }));
}

TEST_F(HttpServerTest, RefusesConnectionsBeyondTheirNumber) {
  start({.max_connections = 2});
  std::optional<RawClient> first(std::in_place, server_->port()), second(std::in_place, server_->port());
  ASSERT_TRUE(eventually([&] { return server_->statistics().connections == 2; }));
  RawClient third(server_->port());
  EXPECT_NE(third.read_all().find("error 503"), std::string::npos);
  first.reset();
  ASSERT_TRUE(eventually([&] { return server_->statistics().connections == 1; }));
  RawClient fourth(server_->port());
  fourth.send(get("/a"));
  EXPECT_NE(fourth.read_until("GET/a0").find("200"), std::string::npos);
}

TEST_F(HttpServerTest, StreamsInChunksAndSaysWhenTheClientHasGone) {
  start();
  RawClient client(server_->port());
  client.send(get("/stream"));
  EXPECT_NE(client.read_until("begun\n\n").find("Transfer-Encoding: chunked"), std::string::npos);
  write_stream("data: more\n\n", /*last=*/true);
  client.read_until("data: more\n\n\r\n0\r\n\r\n");
  client.send(get("/stream"));  // the connection goes on
  client.read_until("begun\n\n");
  EXPECT_EQ(gone_, 0);
  client.close();
  EXPECT_TRUE(eventually([&] { return gone_ == 1; }));
  write_stream("to nobody");
  EXPECT_EQ(server_->statistics().gone, 1);
}

TEST_F(HttpServerTest, DisconnectsAClientThatDoesNotRead) {
  start({.max_unsent = {100000}});
  RawClient slow(server_->port(), /*receive_buffer=*/4096);
  slow.send(get("/stream"));
  ASSERT_TRUE(eventually([&] { return requests_ == 1; }));
  for (int i = 0; i < 400 && gone_ == 0; ++i) {
    write_stream(std::string(50000, 'x'));
    RawClient other(server_->port());  // is served at the same time
    other.send(get("/a"));
    EXPECT_NE(other.read_until("GET/a0").find("200"), std::string::npos);
  }
  EXPECT_TRUE(eventually([&] { return gone_ == 1; }));
  EXPECT_EQ(server_->statistics().cut_off, 1);
}

TEST_F(HttpServerTest, DisconnectsAClientThatReadsNothingInTime) {
  start({.write_timeout_seconds = 0.1});
  RawClient slow(server_->port(), /*receive_buffer=*/4096);
  slow.send(get("/stream"));
  ASSERT_TRUE(eventually([&] { return requests_ == 1; }));
  write_stream(std::string(4 << 20, 'x'));
  EXPECT_TRUE(eventually([&] { return gone_ == 1; }));
}

TEST_F(HttpServerTest, EachWorkOfEveryIsRepeated) {
  start();
  std::atomic<int> often = 0, seldom = 0;
  server_->every(0.001, [&] { ++often; });
  server_->every(0.004, [&] { ++seldom; });
  EXPECT_TRUE(eventually([&] { return often >= 5 && seldom >= 3; }));
  server_->close(0);  // its thread uses the counts
}

TEST_F(HttpServerTest, RecognizesLoopbackAndTakenAddresses) {
  EXPECT_TRUE(is_loopback("127.0.0.1"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_TRUE(is_loopback("localhost"));
  EXPECT_FALSE(is_loopback("0.0.0.0"));
  EXPECT_THROW(is_loopback("example.org"), UserError);
  start();
  EXPECT_THROW(HttpServer({.host = "127.0.0.1", .port = server_->port()}, {}), UserError);
}

}  // namespace
}  // namespace bough

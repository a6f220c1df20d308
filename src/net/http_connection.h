// One client's connection to an HttpServer. Part of the server's implementation.
#pragma once

#include <array>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>

#include "net/http_server.h"

namespace bough {

class Connection;

// The part of a server that its connections use.
struct ConnectionContext {
  const HttpServerOptions options;
  const HttpServer::Handler handler;
  HttpStatistics statistics;
  const std::shared_ptr<std::atomic<int64_t>> buffered = std::make_shared<std::atomic<int64_t>>(0);
  boost::asio::io_context context{1};
  std::unordered_set<std::shared_ptr<Connection>> connections;  // I/O thread only
  bool is_closing = false;                                      // I/O thread only
};

// Reads one request, answers it, then reads the next one. I/O thread only.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  // `context` must outlive the connection.
  Connection(ConnectionContext& context, boost::asio::ip::tcp::socket socket)
      : context_(context), socket_(std::move(socket)), timer_(context.context) {}

  void start();
  void close();
  bool is_busy() const { return state_ == State::kBusy; }

  // The answer to request `number`, by HttpExchange.
  bool answers(uint64_t number) const;
  void on_gone(std::function<void()> gone) { gone_ = std::move(gone); }
  void respond(const HttpResponse& response);
  void begin_stream(const HttpHeaders& headers);
  void write(std::string_view text);
  void finish();

 private:
  enum class State { kIdle, kReading, kBusy, kLingering };
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;
  struct Hold;

  const HttpLimits& limits() const { return context_.options.limits; }
  std::string header_text(const HttpHeaders& headers) const;
  void expect_request();
  void arm(double seconds);
  void disarm();
  void time_is_up();
  void read();
  void has_read(const boost::system::error_code& error, size_t count);
  void parse();
  void take_request();
  void refuse(int status, const std::string& message);
  void flush();
  void read_stream();
  void complete();
  void next();
  void linger();

  ConnectionContext& context_;
  boost::asio::ip::tcp::socket socket_;
  boost::asio::steady_timer timer_;
  uint64_t timer_number_ = 0;
  State state_ = State::kIdle;
  std::optional<Parser> parser_;
  std::shared_ptr<Hold> hold_;
  std::array<char, 16 << 10> chunk_;
  std::string incoming_;            // read but not parsed
  std::string outgoing_, writing_;  // to write next; being written (`written_` bytes are done)
  size_t written_ = 0, lingered_ = 0;
  std::shared_ptr<std::istream> stream_;  // of the answer that is being sent
  int64_t stream_left_ = 0;               // its bytes that are not in outgoing_ yet
  uint64_t number_ = 0;                   // the request's number
  bool is_reading_ = false, is_writing_ = false, is_closed_ = false;
  bool keep_alive_ = true, is_chunked_ = true, is_head_ = false;
  bool is_streaming_ = false, is_complete_ = false, is_body_due_ = false;
  std::function<void()> gone_;
};

}  // namespace bough

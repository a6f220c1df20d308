#include "net/http_server.h"

#include <algorithm>
#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <unordered_set>

#include "base/error.h"
#include "base/log.h"

namespace bough {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;
using boost::system::error_code;

namespace {

constexpr size_t kReadBytes = 16 << 10;    // per read
constexpr size_t kAheadBytes = 64 << 10;   // limit on input read ahead while a request is answered
constexpr size_t kLongBody = 256 << 10;    // prepare() uses the second thread for longer bodies
constexpr size_t kLingerBytes = 64 << 20;  // most input discarded after an answer that ends a connection
constexpr double kLingerSeconds = 2;       // how long input is discarded
constexpr std::chrono::milliseconds kAcceptPause{100};  // pause if the process has no free descriptor

asio::ip::address parse_address(const std::string& host) {
  if (host == "localhost") return asio::ip::address_v4::loopback();
  error_code error;
  const auto address = asio::ip::make_address(host, error);
  if (error) throw UserError(str("host: got ", quoted(host), ", expected an IP address or localhost"));
  return address;
}

const char* reason_of(int status) {
  return http::obsolete_reason(static_cast<http::status>(status)).data();
}

}  // namespace

bool is_loopback(const std::string& host) {
  return parse_address(host).is_loopback();
}

std::string HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers)
    if (key == name) return value;
  return "";
}

class Connection;

namespace {

// Adds the bytes of one body to the server's total until the Hold is destroyed.
struct Hold {
  explicit Hold(std::shared_ptr<std::atomic<int64_t>> sum) : total(std::move(sum)) {}
  ~Hold() { *total -= bytes; }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  void grow(int64_t size) {
    *total += size - bytes;
    bytes = size;
  }
  const std::shared_ptr<std::atomic<int64_t>> total;
  int64_t bytes = 0;
};

}  // namespace

struct HttpServer::State {
  State(HttpServerOptions given, Handler call)
      : options(std::move(given)), handler(std::move(call)), acceptor(context), accept_timer(context) {}

  void listen();
  void accept();
  void repeat(std::chrono::steady_clock::duration period, std::function<void()> work);
  void close_all();

  const HttpServerOptions options;
  const Handler handler;
  HttpStatistics statistics;
  const std::shared_ptr<std::atomic<int64_t>> buffered = std::make_shared<std::atomic<int64_t>>(0);
  asio::io_context context{1};
  tcp::acceptor acceptor;
  asio::steady_timer accept_timer;
  std::optional<asio::steady_timer> repeat_timer;
  std::unordered_set<std::shared_ptr<Connection>> connections;  // I/O thread only
  bool is_closing = false;                                      // I/O thread only
  int port = 0;
  asio::thread_pool short_lane{1}, long_lane{1};
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work;
  std::thread thread;
};

// A client's connection: reads one request, answers it, then reads the next one. Runs on the I/O thread only.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(HttpServer::State& server, tcp::socket socket)
      : server_(server), socket_(std::move(socket)), timer_(server.context) {}

  void start() {
    error_code ignored;
    socket_.set_option(tcp::no_delay(true), ignored);
    expect_request();
    arm(limits().header_timeout_seconds);
    read();
  }

  void close() {
    if (is_closed_) return;
    const auto self = shared_from_this();
    is_closed_ = true;
    ++timer_number_;
    timer_.cancel();
    error_code ignored;
    socket_.shutdown(tcp::socket::shutdown_both, ignored);
    socket_.close(ignored);
    if (state_ == State::kBusy && !is_complete_) {
      ++server_.statistics.gone;
      // The callback is posted: it may belong to the caller of the write() that has just failed, so it must
      // run after write() has returned.
      if (gone_) asio::post(server_.context, std::exchange(gone_, {}));
    }
    gone_ = {};
    server_.connections.erase(self);
    --server_.statistics.connections;
  }

  bool is_busy() const { return state_ == State::kBusy; }
  bool answers(uint64_t number) const {
    return !is_closed_ && number == number_ && is_busy() && !is_complete_;
  }
  void on_gone(std::function<void()> gone) { gone_ = std::move(gone); }

  void respond(const HttpResponse& response) {
    if (response.close || server_.is_closing) keep_alive_ = false;
    outgoing_ +=
        str("HTTP/1.1 ", response.status, " ", reason_of(response.status),
            "\r\nContent-Type: ", response.content_type, "\r\nContent-Length: ", response.body.size(), "\r\n",
            header_text(response.headers), "\r\n");
    if (!is_head_) outgoing_ += response.body;
    complete();
  }
  void begin_stream(const HttpHeaders& headers) {
    if (server_.is_closing || !is_chunked_) keep_alive_ = false;
    outgoing_ += str("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n",
                     "Cache-Control: no-cache\r\n", is_chunked_ ? "Transfer-Encoding: chunked\r\n" : "",
                     header_text(headers), "\r\n");
    is_streaming_ = true;
    flush();
  }
  void write(std::string_view text) {
    if (text.empty()) return;
    if (is_chunked_) {
      std::array<char, 24> size;
      const int length = std::snprintf(size.data(), size.size(), "%zx\r\n", text.size());
      outgoing_.append(size.data(), static_cast<size_t>(length));
      outgoing_.append(text);
      outgoing_ += "\r\n";
    } else {
      outgoing_.append(text);
    }
    if (outgoing_.size() > static_cast<size_t>(limits().max_unsent.count)) {
      ++server_.statistics.cut_off;
      return close();
    }
    flush();
  }
  void finish() {
    if (is_streaming_ && is_chunked_) outgoing_ += "0\r\n\r\n";
    complete();
  }

 private:
  enum class State { kIdle, kReading, kBusy, kLingering };
  using Parser = http::request_parser<http::string_body>;

  const HttpLimits& limits() const { return server_.options.limits; }
  std::string header_text(const HttpHeaders& headers) const {
    std::string text = keep_alive_ ? "" : "Connection: close\r\n";
    for (const auto& [name, value] : headers) text += name + ": " + value + "\r\n";
    return text;
  }

  void expect_request() {
    parser_.emplace();
    hold_ = std::make_shared<Hold>(server_.buffered);
    parser_->body_limit(static_cast<uint64_t>(limits().max_body.count));
    parser_->header_limit(static_cast<uint32_t>(limits().max_header.count));
    parser_->eager(true);
    state_ = State::kIdle;
    is_complete_ = is_streaming_ = is_head_ = is_body_due_ = false;
    ++number_;
  }

  // One timer serves all states of the connection. When it fires, the current state decides what happens.
  void arm(double seconds) {
    const uint64_t number = ++timer_number_;
    timer_.expires_after(std::chrono::duration_cast<std::chrono::steady_clock::duration>(
        std::chrono::duration<double>(seconds)));
    timer_.async_wait([self = shared_from_this(), number](const error_code& error) {
      if (!error && number == self->timer_number_ && !self->is_closed_) self->time_is_up();
    });
  }
  void disarm() {
    ++timer_number_;
    timer_.cancel();
  }
  void time_is_up() {
    if (state_ == State::kReading) return refuse(408, "the request was not complete in time");
    if (state_ == State::kBusy) ++server_.statistics.cut_off;
    close();
  }

  void read() {
    if (is_reading_ || is_closed_) return;
    if (state_ == State::kBusy && incoming_.size() > kAheadBytes) return;
    is_reading_ = true;
    socket_.async_read_some(asio::buffer(chunk_),
                            [self = shared_from_this()](const error_code& error, size_t count) {
                              self->is_reading_ = false;
                              if (!self->is_closed_) self->has_read(error, count);
                            });
  }

  void has_read(const error_code& error, size_t count) {
    if (error) return close();
    if (state_ == State::kLingering) {
      lingered_ += count;
      if (lingered_ > kLingerBytes) return close();
      return read();
    }
    incoming_.append(chunk_.data(), count);
    if (state_ != State::kBusy) parse();
    read();
  }

  void parse() {
    if (state_ == State::kIdle) {
      state_ = State::kReading;
      arm(limits().header_timeout_seconds);
    }
    error_code error;
    while (!incoming_.empty() && !parser_->is_done()) {
      const size_t used = parser_->put(asio::const_buffer(incoming_.data(), incoming_.size()), error);
      incoming_.erase(0, used);
      if (error || used == 0) break;
    }
    if (error == http::error::need_more) error = {};
    // Boost 1.74 ignores the limit if a part of the body arrived together with the header.
    const auto longest = static_cast<uint64_t>(limits().max_body.count);
    if (!error && parser_->is_header_done() &&
        std::max<uint64_t>(parser_->content_length().value_or(0), parser_->get().body().size()) > longest)
      error = http::error::body_limit;
    // The buffer holds only input that the parser cannot use until a line is complete: a line of the header,
    // or of the header of a chunk.
    if (!error && !parser_->is_done() && incoming_.size() > static_cast<size_t>(limits().max_header.count))
      error = http::error::header_limit;
    if (error == http::error::body_limit)
      return refuse(413, str("the body is longer than ", limits().max_body.count, " bytes (http.max_body)"));
    if (error == http::error::header_limit)
      return refuse(431,
                    str("the header is longer than ", limits().max_header.count, " bytes (http.max_header)"));
    if (error) return refuse(400, "the request is not HTTP/1.1: " + error.message());
    hold_->grow(static_cast<int64_t>(parser_->get().body().size()));
    if (server_.buffered->load() > limits().max_buffered.count)
      return refuse(503,
                    "the server is reading too many request bodies (http.max_buffered); try again later");
    if (parser_->is_done()) return take_request();
    if (parser_->is_header_done() && !is_body_due_) {
      is_body_due_ = true;
      arm(limits().body_timeout_seconds);
      if (boost::beast::iequals(parser_->get()[http::field::expect], "100-continue")) {
        outgoing_ += "HTTP/1.1 100 Continue\r\n\r\n";
        flush();
      }
    }
  }

  void take_request() {
    disarm();
    state_ = State::kBusy;
    auto& message = parser_->get();
    keep_alive_ = message.keep_alive();
    is_chunked_ = message.version() >= 11;
    is_head_ = message.method() == http::verb::head;
    HttpRequest request;
    request.method = std::string(message.method_string());
    request.path = std::string(message.target());
    request.path.resize(std::min(request.path.size(), request.path.find('?')));
    for (const auto& field : message) {
      std::string name(field.name_string());
      std::transform(name.begin(), name.end(), name.begin(),
                     [](unsigned char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
      request.headers.emplace_back(std::move(name), std::string(field.value()));
    }
    request.body = std::move(message.body());
    request.hold = std::move(hold_);
    hand_over(std::move(request));
  }
  void hand_over(HttpRequest request);

  // Answers a request that cannot be read with an error, and ends the connection.
  void refuse(int status, const std::string& message) {
    ++server_.statistics.malformed;
    disarm();
    std::string path(parser_->get().target());  // empty if it was not parsed
    path.resize(std::min(path.size(), path.find('?')));
    state_ = State::kBusy;
    incoming_.clear();
    hold_ = {};
    respond({.status = status, .body = server_.options.error_body(status, message, path), .close = true});
  }

  void flush() {
    if (is_writing_ || is_closed_) return;
    if (written_ == writing_.size()) {
      if (outgoing_.empty()) return;
      writing_.clear();
      writing_.swap(outgoing_);
      written_ = 0;
    }
    is_writing_ = true;
    if (state_ == State::kBusy) arm(limits().write_timeout_seconds);
    socket_.async_write_some(asio::buffer(writing_.data() + written_, writing_.size() - written_),
                             [self = shared_from_this()](const error_code& error, size_t count) {
                               self->is_writing_ = false;
                               if (self->is_closed_) return;
                               if (error) return self->close();
                               self->written_ += count;
                               if (self->written_ < self->writing_.size() || !self->outgoing_.empty())
                                 return self->flush();
                               if (self->state_ != State::kBusy) return;
                               self->disarm();
                               if (self->is_complete_) self->next();
                             });
  }

  void complete() {
    is_complete_ = true;
    gone_ = {};
    flush();
    if (!is_writing_ && !is_closed_) next();
  }

  // Called when the answer is written.
  void next() {
    std::string().swap(writing_);
    written_ = 0;
    if (!keep_alive_) return linger();
    expect_request();
    arm(limits().idle_timeout_seconds);
    if (!incoming_.empty()) parse();
    read();
  }
  // Discards further input: if a socket with unread input is closed, the client's system drops the answer.
  void linger() {
    state_ = State::kLingering;
    error_code ignored;
    socket_.shutdown(tcp::socket::shutdown_send, ignored);
    arm(kLingerSeconds);
    read();
  }

  HttpServer::State& server_;
  tcp::socket socket_;
  asio::steady_timer timer_;
  uint64_t timer_number_ = 0;
  State state_ = State::kIdle;
  std::optional<Parser> parser_;
  std::shared_ptr<Hold> hold_;
  std::array<char, kReadBytes> chunk_;
  std::string incoming_;            // read but not parsed
  std::string outgoing_, writing_;  // to write next; being written (`written_` bytes are done)
  size_t written_ = 0, lingered_ = 0;
  uint64_t number_ = 0;  // the request's number
  bool is_reading_ = false, is_writing_ = false, is_closed_ = false;
  bool keep_alive_ = true, is_chunked_ = true, is_head_ = false;
  bool is_streaming_ = false, is_complete_ = false, is_body_due_ = false;
  std::function<void()> gone_;
};

namespace {

class Exchange final : public HttpExchange {
 public:
  Exchange(std::shared_ptr<Connection> connection, uint64_t number)
      : connection_(std::move(connection)), number_(number) {}
  void respond(HttpResponse response) override {
    if (is_open()) connection_->respond(response);
  }
  void begin_stream(const HttpHeaders& headers) override {
    if (is_open()) connection_->begin_stream(headers);
  }
  void write(std::string_view text) override {
    if (is_open()) connection_->write(text);
  }
  void finish() override {
    if (is_open()) connection_->finish();
  }
  bool is_open() const override { return connection_->answers(number_); }
  void on_gone(std::function<void()> gone) override {
    if (is_open()) connection_->on_gone(std::move(gone));
  }

 private:
  const std::shared_ptr<Connection> connection_;
  const uint64_t number_;
};

}  // namespace

void Connection::hand_over(HttpRequest request) {
  server_.handler(std::move(request), std::make_shared<Exchange>(shared_from_this(), number_));
}

void HttpServer::State::listen() {
  const tcp::endpoint endpoint(parse_address(options.host), static_cast<uint16_t>(options.port));
  const auto check = [&](const error_code& error) {
    if (error)
      throw UserError(str("cannot listen at ", options.host, " port ", options.port, ": ", error.message(),
                          "; choose another host or port (port=0: a free one)"));
  };
  error_code error;
  acceptor.open(endpoint.protocol(), error);
  check(error);
  acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  check(error);
  acceptor.bind(endpoint, error);
  check(error);
  acceptor.listen(tcp::acceptor::max_listen_connections, error);
  check(error);
  port = acceptor.local_endpoint().port();
}

void HttpServer::State::accept() {
  acceptor.async_accept([this](const error_code& error, tcp::socket socket) {
    if (!acceptor.is_open()) return;
    if (error) {
      accept_timer.expires_after(kAcceptPause);
      accept_timer.async_wait([this](const error_code& cancelled) {
        if (!cancelled && acceptor.is_open()) accept();
      });
      return;
    }
    if (static_cast<int64_t>(connections.size()) >= options.limits.max_connections) {
      ++statistics.refused;
      const std::string body = options.error_body(503, "too many connections (http.max_connections)", "");
      const std::string text =
          str("HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n",
              "Connection: close\r\nContent-Length: ", body.size(), "\r\n\r\n", body);
      error_code ignored;
      socket.non_blocking(true, ignored);
      socket.write_some(asio::buffer(text), ignored);
    } else {
      ++statistics.accepted;
      ++statistics.connections;
      const auto connection = std::make_shared<Connection>(*this, std::move(socket));
      connections.insert(connection);
      connection->start();
    }
    accept();
  });
}

void HttpServer::State::repeat(std::chrono::steady_clock::duration period, std::function<void()> work) {
  if (is_closing) return;
  if (!repeat_timer) repeat_timer.emplace(context);
  repeat_timer->expires_after(period);
  repeat_timer->async_wait([this, period, work = std::move(work)](const error_code& cancelled) {
    if (cancelled || is_closing) return;
    work();
    repeat(period, work);
  });
}

void HttpServer::State::close_all() {
  if (repeat_timer) repeat_timer->cancel();
  const std::vector<std::shared_ptr<Connection>> all(connections.begin(), connections.end());
  for (const auto& connection : all) connection->close();
}

HttpServer::HttpServer(HttpServerOptions options, Handler handler)
    : state_(std::make_unique<State>(std::move(options), std::move(handler))) {
  state_->listen();
  state_->accept();
  state_->work.emplace(state_->context.get_executor());
  state_->thread = std::thread([state = state_.get()] {
    for (;;) {
      try {
        state->context.run();
        return;
        // An error of one connection, such as no memory, must not end the other connections.
      } catch (const std::exception& error) {
        log_error(str("serve: ", error.what()));
      }
    }
  });
}

HttpServer::~HttpServer() {
  close();
}

int HttpServer::port() const {
  return state_->port;
}

std::string HttpServer::url() const {
  const bool is_v6 = state_->options.host.find(':') != std::string::npos;
  return str("http://", is_v6 ? "[" : "", state_->options.host, is_v6 ? "]" : "", ":", port());
}

void HttpServer::post(std::function<void()> work) {
  asio::post(state_->context, std::move(work));
}

void HttpServer::prepare(size_t bytes, std::function<void()> work) {
  asio::post(bytes < kLongBody ? state_->short_lane : state_->long_lane, std::move(work));
}

void HttpServer::every(double seconds, std::function<void()> work) {
  const auto period =
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
  post([state = state_.get(), period, work = std::move(work)] { state->repeat(period, work); });
}

void HttpServer::stop_accepting() {
  post([state = state_.get()] {
    error_code ignored;
    state->acceptor.close(ignored);
    state->accept_timer.cancel();
  });
}

void HttpServer::close(double seconds) {
  if (!state_->thread.joinable()) return;
  stop_accepting();
  state_->short_lane.stop();
  state_->long_lane.stop();
  state_->short_lane.join();
  state_->long_lane.join();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (bool is_first = true;; is_first = false) {
    std::promise<bool> has_busy;
    post([&] {
      state_->is_closing = true;
      bool any = false;
      for (const auto& connection : state_->connections) any = any || connection->is_busy();
      has_busy.set_value(any);
    });
    if (!has_busy.get_future().get() || std::chrono::steady_clock::now() >= deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(is_first ? 1 : 10));
  }
  post([state = state_.get()] { state->close_all(); });
  state_->work.reset();
  state_->thread.join();
}

const HttpStatistics& HttpServer::statistics() const {
  return state_->statistics;
}

}  // namespace bough

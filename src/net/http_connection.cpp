#include "net/http_connection.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <chrono>

#include "base/error.h"

namespace bough {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;
using boost::system::error_code;

namespace {

constexpr size_t kAheadBytes = 64 << 10;    // limit on input read ahead while a request is answered
constexpr size_t kLingerBytes = 64 << 20;   // most input discarded after an answer that ends a connection
constexpr int64_t kPieceBytes = 256 << 10;  // of an answer's stream, read at once
constexpr double kLingerSeconds = 2;        // how long input is discarded

const char* reason_of(int status) {
  return http::obsolete_reason(static_cast<http::status>(status)).data();
}

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

// Adds the bytes of one body to the server's total until the Hold is destroyed.
struct Connection::Hold {
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

void Connection::start() {
  error_code ignored;
  socket_.set_option(tcp::no_delay(true), ignored);
  expect_request();
  arm(limits().header_timeout_seconds);
  read();
}

void Connection::close() {
  if (is_closed_) return;
  const auto self = shared_from_this();
  is_closed_ = true;
  ++timer_number_;
  timer_.cancel();
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_both, ignored);
  socket_.close(ignored);
  if (state_ == State::kBusy && !is_complete_) {
    ++context_.statistics.gone;
    // The callback is posted: it may belong to the caller of the write() that has just failed, so it must
    // run after write() has returned.
    if (gone_) asio::post(context_.context, std::exchange(gone_, {}));
  }
  gone_ = {};
  context_.connections.erase(self);
  --context_.statistics.connections;
}

bool Connection::answers(uint64_t number) const {
  return !is_closed_ && number == number_ && is_busy() && !is_complete_;
}

void Connection::respond(const HttpResponse& response) {
  if (response.close || context_.is_closing) keep_alive_ = false;
  const int64_t length = response.stream ? response.stream_bytes : std::ssize(response.body);
  outgoing_ += str("HTTP/1.1 ", response.status, " ", reason_of(response.status),
                   "\r\nContent-Type: ", response.content_type, "\r\nContent-Length: ", length, "\r\n",
                   header_text(response.headers), "\r\n");
  if (!is_head_ && response.stream) {
    stream_ = response.stream;
    stream_left_ = length;
  } else if (!is_head_) {
    outgoing_ += response.body;
  }
  complete();
}

void Connection::begin_stream(const HttpHeaders& headers) {
  if (context_.is_closing || !is_chunked_) keep_alive_ = false;
  outgoing_ += str("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n",
                   "Cache-Control: no-cache\r\n", is_chunked_ ? "Transfer-Encoding: chunked\r\n" : "",
                   header_text(headers), "\r\n");
  is_streaming_ = true;
  flush();
}

void Connection::write(std::string_view text) {
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
    ++context_.statistics.cut_off;
    return close();
  }
  flush();
}

void Connection::finish() {
  if (is_streaming_ && is_chunked_) outgoing_ += "0\r\n\r\n";
  complete();
}

std::string Connection::header_text(const HttpHeaders& headers) const {
  std::string text = keep_alive_ ? "" : "Connection: close\r\n";
  for (const auto& [name, value] : headers) text += name + ": " + value + "\r\n";
  return text;
}

void Connection::expect_request() {
  parser_.emplace();
  hold_ = std::make_shared<Hold>(context_.buffered);
  parser_->body_limit(static_cast<uint64_t>(limits().max_body.count));
  parser_->header_limit(static_cast<uint32_t>(limits().max_header.count));
  parser_->eager(true);
  state_ = State::kIdle;
  is_complete_ = is_streaming_ = is_head_ = is_body_due_ = false;
  ++number_;
}

// One timer serves all states of the connection. When it fires, the current state decides what happens.
void Connection::arm(double seconds) {
  const uint64_t number = ++timer_number_;
  timer_.expires_after(std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(seconds)));
  timer_.async_wait([self = shared_from_this(), number](const error_code& error) {
    if (!error && number == self->timer_number_ && !self->is_closed_) self->time_is_up();
  });
}

void Connection::disarm() {
  ++timer_number_;
  timer_.cancel();
}

void Connection::time_is_up() {
  if (state_ == State::kReading) return refuse(408, "the request was not complete in time");
  if (state_ == State::kBusy) ++context_.statistics.cut_off;
  close();
}

void Connection::read() {
  if (is_reading_ || is_closed_) return;
  if (state_ == State::kBusy && incoming_.size() > kAheadBytes) return;
  is_reading_ = true;
  socket_.async_read_some(asio::buffer(chunk_),
                          [self = shared_from_this()](const error_code& error, size_t count) {
                            self->is_reading_ = false;
                            if (!self->is_closed_) self->has_read(error, count);
                          });
}

void Connection::has_read(const error_code& error, size_t count) {
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

void Connection::parse() {
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
  if (context_.buffered->load() > limits().max_buffered.count)
    return refuse(503, "the server is reading too many request bodies (http.max_buffered); try again later");
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

void Connection::take_request() {
  disarm();
  state_ = State::kBusy;
  auto& message = parser_->get();
  keep_alive_ = message.keep_alive();
  is_chunked_ = message.version() >= 11;
  is_head_ = message.method() == http::verb::head;
  HttpRequest request;
  request.method = std::string(message.method_string());
  request.path = std::string(message.target());
  const size_t mark = std::min(request.path.size(), request.path.find('?'));
  request.query = parse_query(std::string_view(request.path).substr(std::min(request.path.size(), mark + 1)));
  request.path.resize(mark);
  for (const auto& field : message) {
    std::string name(field.name_string());
    std::transform(name.begin(), name.end(), name.begin(),
                   [](unsigned char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
    request.headers.emplace_back(std::move(name), std::string(field.value()));
  }
  request.body = std::move(message.body());
  request.hold = std::move(hold_);
  context_.handler(std::move(request), std::make_shared<Exchange>(shared_from_this(), number_));
}

// Answers a request that cannot be read with an error, and ends the connection.
void Connection::refuse(int status, const std::string& message) {
  ++context_.statistics.malformed;
  disarm();
  std::string path(parser_->get().target());  // empty if it was not parsed
  path.resize(std::min(path.size(), path.find('?')));
  state_ = State::kBusy;
  incoming_.clear();
  hold_ = {};
  respond({.status = status, .body = context_.options.error_body(status, message, path), .close = true});
}

void Connection::flush() {
  if (is_writing_ || is_closed_) return;
  if (written_ == writing_.size()) {
    if (outgoing_.empty()) read_stream();
    if (outgoing_.empty() || is_closed_) return;
    writing_.clear();
    writing_.swap(outgoing_);
    written_ = 0;
  }
  is_writing_ = true;
  if (state_ == State::kBusy) arm(limits().write_timeout_seconds);
  socket_.async_write_some(
      asio::buffer(writing_.data() + written_, writing_.size() - written_),
      [self = shared_from_this()](const error_code& error, size_t count) {
        self->is_writing_ = false;
        if (self->is_closed_) return;
        if (error) return self->close();
        self->written_ += count;
        if (self->written_ < self->writing_.size() || !self->outgoing_.empty() || self->stream_left_ > 0)
          return self->flush();
        if (self->state_ != State::kBusy) return;
        self->disarm();
        if (self->is_complete_) self->next();
      });
}

// Reads the next piece of the answer's stream. If the stream ends early, the connection is closed: the client
// sees that the body is too short.
void Connection::read_stream() {
  if (stream_left_ == 0) return;
  outgoing_.resize(static_cast<size_t>(std::min<int64_t>(stream_left_, kPieceBytes)));
  if (!stream_->read(outgoing_.data(), std::ssize(outgoing_))) return close();
  stream_left_ -= std::ssize(outgoing_);
  if (stream_left_ == 0) stream_ = nullptr;
}

void Connection::complete() {
  is_complete_ = true;
  gone_ = {};
  flush();
  if (!is_writing_ && !is_closed_) next();
}

// Called when the answer is written.
void Connection::next() {
  std::string().swap(writing_);
  written_ = 0;
  if (!keep_alive_) return linger();
  expect_request();
  arm(limits().idle_timeout_seconds);
  if (!incoming_.empty()) parse();
  read();
}

// Discards further input: if a socket with unread input is closed, the client's system drops the answer.
void Connection::linger() {
  state_ = State::kLingering;
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
  arm(kLingerSeconds);
  read();
}

}  // namespace bough

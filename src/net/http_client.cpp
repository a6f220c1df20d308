#include "net/http_client.h"

#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "net/worker_process.h"

namespace bough {

namespace http = boost::beast::http;

namespace {

constexpr std::string_view kScheme = "http://";
constexpr std::chrono::milliseconds kStartPause{200};  // between attempts while the server is not up yet
constexpr uint32_t kMaxHeaderBytes = 1 << 16;

// A connection attempt after its call of connect(). The connection may not be complete yet. `error` is errno
// if the attempt failed, else 0.
struct Connecting {
  int descriptor = -1;
  int error = 0;
};

Connecting begin_connection(const HttpAddress& address) {
  const int descriptor = socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return {-1, errno};
  const int one = 1;
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  const auto* const target = reinterpret_cast<const sockaddr*>(&address.storage);
  if (connect(descriptor, target, address.size) == 0 || errno == EINPROGRESS) return {descriptor, 0};
  return {descriptor, errno};
}

int error_of_socket(int descriptor) {
  int error = 0;
  socklen_t size = sizeof error;
  return getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

std::vector<HttpAddress> look_up(const HttpUrl& url, int& error) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  error = getaddrinfo(url.host.c_str(), url.port.c_str(), &hints, &found);
  std::vector<HttpAddress> addresses;
  for (const addrinfo* each = error == 0 ? found : nullptr; each != nullptr; each = each->ai_next) {
    HttpAddress& address = addresses.emplace_back();
    std::memcpy(&address.storage, each->ai_addr, each->ai_addrlen);
    address.size = each->ai_addrlen;
  }
  if (error == 0) freeaddrinfo(found);
  return addresses;
}

// Returns errno of the attempt, 0 if the connection succeeded.
int try_connection(const HttpAddress& address, std::chrono::milliseconds limit) {
  Connecting connecting = begin_connection(address);
  if (connecting.error == 0) {
    pollfd watched{connecting.descriptor, POLLOUT, 0};
    const int ready = poll(&watched, 1, static_cast<int>(limit.count()));
    connecting.error = ready > 0 ? error_of_socket(connecting.descriptor) : ETIMEDOUT;
  }
  if (connecting.descriptor >= 0) close(connecting.descriptor);
  return connecting.error;
}

}  // namespace

HttpAddress wait_for_endpoint(const std::string& what, const HttpUrl& url, double limit_seconds,
                              const std::string& setting) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(limit_seconds));
  bool is_said = false;
  std::string why;
  for (;;) {
    int name_error = 0;
    const std::vector<HttpAddress> addresses = look_up(url, name_error);
    if (name_error == EAI_NONAME) throw UserError(str(what, ": unknown host ", quoted(url.host)));
    why = name_error != 0 ? gai_strerror(name_error) : "";
    for (const HttpAddress& address : addresses) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
      const int error = try_connection(
          address,
          std::clamp<std::chrono::milliseconds>(left, std::chrono::milliseconds(1), std::chrono::seconds(5)));
      if (error == 0) return address;
      why = std::strerror(error);
    }
    if (Clock::now() + kStartPause >= deadline)
      throw IoError(str(what, ": no connection within ", limit_seconds, " s (", setting, "): ", why,
                        "; start the endpoint before the run, or correct the URL"));
    if (!std::exchange(is_said, true)) log_info(str(what, ": ", why, "; waiting for the endpoint"));
    std::this_thread::sleep_for(kStartPause);
  }
}

HttpUrl parse_http_url(const std::string& url, const std::string& setting) {
  const auto refuse = [&](const std::string& why) -> UserError {
    return UserError(str(setting, ": got ", quoted(url), why));
  };
  if (url.starts_with("https://"))
    throw refuse(
        ": https is not supported; expected http://HOST:PORT/PATH, such as a proxy on this machine that "
        "speaks https for you");
  if (!url.starts_with(kScheme)) throw refuse(", expected http://HOST:PORT/PATH");
  const bool is_printable =
      std::all_of(url.begin(), url.end(), [](const unsigned char c) { return c > 0x20 && c < 0x7F; });
  if (!is_printable) throw refuse(", expected no spaces and no characters beyond ASCII (write them as %XX)");
  const std::string rest = url.substr(kScheme.size());
  HttpUrl out;
  out.authority = rest.substr(0, rest.find_first_of("/?#"));
  out.target = rest.substr(out.authority.size());
  out.target = out.target.substr(0, out.target.find('#'));
  if (!out.target.starts_with('/')) out.target = "/" + out.target;
  if (out.authority.find('@') != std::string::npos)
    throw refuse(": names and passwords in the URL are not supported");
  out.host = out.authority;
  out.port = "80";
  const size_t bracket = out.authority.find(']');
  const size_t colon = out.authority.rfind(':');
  if (colon != std::string::npos && (bracket == std::string::npos || colon > bracket)) {
    out.host = out.authority.substr(0, colon);
    out.port = out.authority.substr(colon + 1);
  }
  if (out.host.starts_with('[') && out.host.ends_with(']'))
    out.host = out.host.substr(1, out.host.size() - 2);
  const bool is_port = !out.port.empty() && out.port.size() <= 5 &&
                       out.port.find_first_not_of("0123456789") == std::string::npos &&
                       std::stoi(out.port) >= 1 && std::stoi(out.port) <= 65535;
  if (out.host.empty()) throw refuse(": no host, expected http://HOST:PORT/PATH");
  if (!is_port) throw refuse(": the port is not a number from 1 to 65535");
  return out;
}

std::string load_api_key(const char* variable, const std::string& setting, const std::string& file) {
  const char* const given = std::getenv(variable);
  if (file.empty()) return given ? given : "";
  std::string key = read_file(file);
  key.resize(std::min(key.size(), key.find_first_of("\r\n")));
  if (key.empty()) throw UserError(str(setting, ": the first line of ", quoted(file), " is empty"));
  return key;
}

IdleConnection::IdleConnection(const HttpAddress& address)
    : descriptor_(begin_connection(address).descriptor) {}

IdleConnection::~IdleConnection() {
  if (descriptor_ >= 0) close(descriptor_);
}

bool IdleConnection::is_open() const {
  pollfd watched{descriptor_, POLLIN, 0};  // a closed connection is readable
  return descriptor_ >= 0 && poll(&watched, 1, 0) == 0;
}

void HttpCall::begin(const std::string& method, const std::string& target, const std::string& json) {
  outgoing_ = str(method, " ", target, " HTTP/1.1\r\nHost: ", url_.authority,
                  "\r\nAccept: application/json\r\nUser-Agent: bough\r\nConnection: close\r\n");
  if (!bearer_.empty()) outgoing_ += str("Authorization: Bearer ", bearer_, "\r\n");
  if (!json.empty()) outgoing_ += "Content-Type: application/json\r\n";
  outgoing_ += str("Content-Length: ", json.size(), "\r\n\r\n", json);
  incoming_.clear();
  expect_response();
  const Connecting connecting = begin_connection(address_);
  descriptor_ = connecting.descriptor;
  error_ = connecting.error;
  is_connected_ = false;
}

std::optional<HttpAnswer> HttpCall::advance() {
  if (descriptor_ < 0 && error_ == 0) return std::nullopt;  // there is no open request
  const auto done = [this](HttpAnswer answer) {
    hang_up();
    return answer;
  };
  if (!is_connected_ && error_ == 0) {
    pollfd watched{descriptor_, POLLOUT, 0};
    if (poll(&watched, 1, 0) <= 0) return std::nullopt;
    error_ = error_of_socket(descriptor_);
    is_connected_ = error_ == 0;
  }
  if (error_ != 0)
    return done(
        {.kind = HttpAnswer::kNotConnected, .message = str("no connection: ", std::strerror(error_))});
  send_what_fits();
  const bool is_open = receive_what_is_there(descriptor_, incoming_);
  boost::system::error_code error = parse();
  if (!error && !parser_->is_done() && !is_open) {
    // put_eof() before any byte would make the parser take an empty answer for a complete one.
    if (parser_->got_some()) parser_->put_eof(error);
    if (!error && !parser_->is_done()) error = http::error::end_of_stream;
  }
  if (error == http::error::partial_message || error == http::error::end_of_stream)
    return done({.kind = HttpAnswer::kLost,
                 .message = "the endpoint closed the connection before its answer was complete"});
  if (error == http::error::body_limit || error == http::error::header_limit)
    return done({.kind = HttpAnswer::kMalformed,
                 .message = str("the endpoint's answer is longer than ", max_bytes_, " bytes")});
  if (error)
    return done({.kind = HttpAnswer::kMalformed,
                 .message = str("the endpoint's answer is not HTTP/1.1: ", error.message())});
  if (!parser_->is_done()) return std::nullopt;
  HttpAnswer answer{.status = parser_->get().result_int(),
                    .reason = std::string(parser_->get().reason()),
                    .body = std::move(parser_->get().body())};
  if (answer.is_success()) return done(std::move(answer));
  answer.message = str("the endpoint answered ", answer.status, " ", answer.reason);
  if (answer.status >= 300 && answer.status < 400)
    answer.message += "; redirects are not followed, give the final URL";
  else if (!answer.body.empty()) answer.message += ": " + quoted(answer.body, 300);
  return done(std::move(answer));
}

std::string HttpCall::take_body() {
  const bool has_body = descriptor_ >= 0 && parser_ && parser_->is_header_done() &&
                        parser_->get().result_int() >= 200 && parser_->get().result_int() < 300;
  return has_body ? std::exchange(parser_->get().body(), {}) : "";
}

void HttpCall::hang_up() {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
  error_ = 0;
  outgoing_.clear();
}

void HttpCall::expect_response() {
  parser_.emplace();
  parser_->body_limit(max_bytes_);
  parser_->header_limit(kMaxHeaderBytes);
  parser_->eager(true);
}

void HttpCall::send_what_fits() {
  while (!outgoing_.empty()) {
    const ssize_t n = send(descriptor_, outgoing_.data(), outgoing_.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    // A server may answer (for example "413 too large") and close before it has read the whole request.
    if (n < 0) return outgoing_.clear();
    outgoing_.erase(0, static_cast<size_t>(n));
  }
}

boost::system::error_code HttpCall::parse() {
  boost::system::error_code error;
  while (!incoming_.empty() && !parser_->is_done()) {
    const size_t used = parser_->put(boost::asio::const_buffer(incoming_.data(), incoming_.size()), error);
    incoming_.erase(0, used);
    // Boost 1.74 ignores the limit on the body's length if a part of the body came with the header.
    if (parser_->is_header_done() && parser_->content_length().value_or(0) > max_bytes_)
      return http::error::body_limit;
    if (error == http::error::need_more) {
      error = {};
      break;
    }
    if (error) break;
    const bool is_interim = parser_->is_done() && parser_->get().result_int() < 200;
    if (is_interim) expect_response();  // for example "102 processing": the final answer is still to come
  }
  return error;
}

}  // namespace bough

#include "net/http_server.h"

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <charconv>
#include <chrono>
#include <future>
#include <list>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "net/http_connection.h"

namespace bough {

namespace asio = boost::asio;
using tcp = asio::ip::tcp;
using boost::system::error_code;

namespace {

constexpr size_t kLongBody = 256 << 10;                 // prepare() uses the second thread for longer bodies
constexpr std::chrono::milliseconds kAcceptPause{100};  // pause if the process has no free descriptor

asio::ip::address parse_address(const std::string& host) {
  if (host == "localhost") return asio::ip::address_v4::loopback();
  error_code error;
  const auto address = asio::ip::make_address(host, error);
  if (error) throw UserError(str("host: got ", quoted(host), ", expected an IP address or localhost"));
  return address;
}

// Whether a Host or Origin header names this machine.
bool names_this_machine(std::string name) {
  if (const size_t scheme = name.find("://"); scheme != std::string::npos) name.erase(0, scheme + 3);
  if (name.starts_with('[')) name = name.substr(1, name.find(']') - 1);
  else name.resize(std::min(name.size(), name.rfind(':')));
  if (name == "localhost") return true;
  try {
    return is_loopback(name);
  } catch (const UserError&) {
    return false;
  }
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

bool is_for_this_machine(const HttpRequest& request) {
  const std::string host = request.header("host"), origin = request.header("origin");
  return (host.empty() || names_this_machine(host)) && (origin.empty() || names_this_machine(origin));
}

HttpHeaders parse_query(std::string_view query) {
  const auto decoded = [](std::string_view text) {
    std::string plain;
    for (size_t i = 0; i < text.size(); ++i) {
      unsigned value = 0;
      const char* const end = text.data() + std::min(i + 3, text.size());
      if (text[i] == '%' && i + 2 < text.size() &&
          std::from_chars(text.data() + i + 1, end, value, 16).ptr == end) {
        plain += static_cast<char>(value);
        i += 2;
      } else {
        plain += text[i] == '+' ? ' ' : text[i];
      }
    }
    return plain;
  };
  HttpHeaders pairs;
  while (!query.empty()) {
    const std::string_view pair = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(query.size(), pair.size() + 1));
    const size_t equals = pair.find('=');
    if (pair.empty()) continue;
    pairs.emplace_back(decoded(pair.substr(0, equals)),
                       equals == std::string_view::npos ? "" : decoded(pair.substr(equals + 1)));
  }
  return pairs;
}

struct HttpServer::State : ConnectionContext {
  State(HttpServerOptions given, Handler call)
      : ConnectionContext{std::move(given), std::move(call)}, acceptor(context), accept_timer(context) {}

  void listen();
  void accept();
  void repeat(asio::steady_timer& timer, std::chrono::steady_clock::duration period,
              std::function<void()> work);
  void close_all();

  tcp::acceptor acceptor;
  asio::steady_timer accept_timer;
  std::list<asio::steady_timer> repeat_timers;  // of every(), one each
  int port = 0;
  asio::thread_pool short_lane{1}, long_lane{1};
  std::optional<asio::executor_work_guard<asio::io_context::executor_type>> work;
  std::thread thread;
};

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

void HttpServer::State::repeat(asio::steady_timer& timer, std::chrono::steady_clock::duration period,
                               std::function<void()> work) {
  if (is_closing) return;
  timer.expires_after(period);
  timer.async_wait([this, &timer, period, work = std::move(work)](const error_code& cancelled) {
    if (cancelled || is_closing) return;
    work();
    repeat(timer, period, work);
  });
}

void HttpServer::State::close_all() {
  for (asio::steady_timer& timer : repeat_timers) timer.cancel();
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
  post([state = state_.get(), period, work = std::move(work)] {
    state->repeat(state->repeat_timers.emplace_back(state->context), period, work);
  });
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

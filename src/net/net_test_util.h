// For tests of network code and worker processes: processes, an HTTP endpoint and an HTTP client.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "base/mutex.h"

namespace bough {

inline bool is_running(pid_t pid) {
  std::string state;
  if (std::ifstream stat(str("/proc/", pid, "/stat")); stat) std::getline(stat, state);
  return !state.empty() && state.find(") Z ") == std::string::npos;
}

// Returns the processes that have `text` in their arguments. Tests pass a unique text: a process in a PID
// namespace cannot report its process id, because it does not know the id outside the namespace.
inline std::vector<pid_t> processes_with(const std::string& text) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const auto pid = static_cast<pid_t>(std::strtol(entry.path().filename().c_str(), nullptr, 10));
    if (pid <= 0 || pid == getpid()) continue;
    std::ostringstream arguments;  // operator<< does not throw if the process ends before it is read
    arguments << std::ifstream(entry.path() / "cmdline").rdbuf();
    if (arguments.str().find(text) != std::string::npos && is_running(pid)) found.push_back(pid);
  }
  return found;
}

// Waits up to 10 s until `is_there` returns false, because processes do not end at once.
inline void expect_gone(const std::function<bool()>& is_there, const std::string& what) {
  for (int i = 0; i < 1000; ++i) {
    if (!is_there()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ADD_FAILURE() << what << " after 10 s";
}
inline void expect_gone(pid_t pid) {
  expect_gone([pid] { return is_running(pid); }, str("process ", pid, " runs"));
}
inline void expect_none_with(const std::string& text) {
  expect_gone([&] { return !processes_with(text).empty(); }, "there is a process with " + text);
}

// A server on 127.0.0.1. It calls the handler for each connection, on a thread of its own.
class Endpoint {
 public:
  struct Connection {
    int descriptor;
    std::string head;  // the request line and headers
    Json request;

    // Returns false if the other side has closed the connection.
    bool send(const std::string& text) const {
      return ::send(descriptor, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
    }
    void answer(const std::string& body, const std::string& status = "200 OK") const {
      send(str("HTTP/1.1 ", status, "\r\nContent-Type: application/json\r\nContent-Length: ", body.size(),
               "\r\nConnection: close\r\n\r\n", body));
    }
    // Returns when the other side closes the connection.
    void wait_for_end() const {
      char byte;
      while (recv(descriptor, &byte, 1, 0) > 0) {
      }
    }
  };
  using Handler = std::function<void(const Connection&)>;

  explicit Endpoint(Handler handler, uint16_t port = 0) : handler_(std::move(handler)) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int one = 1;
    setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener_, 128) != 0 ||
        getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0)
      throw IoError("no server");
    port_ = ntohs(address.sin_port);
    accepting_ = std::thread([this] { accept_all(); });
  }
  ~Endpoint() { stop(); }

  void stop() {
    if (!accepting_.joinable()) return;
    shutdown(listener_, SHUT_RDWR);
    accepting_.join();
    close(listener_);
    {
      const MutexLock lock(mutex_);  // ends connections that wait for a request
      for (const int descriptor : connections_) shutdown(descriptor, SHUT_RD);
    }
    for (std::thread& thread : threads_) thread.join();
  }
  uint16_t port() const { return port_; }
  std::string url(const std::string& target = "/score") const {
    return str("http://127.0.0.1:", port_, target);
  }
  int64_t num_requests() const { return num_requests_; }

 private:
  void accept_all() {
    for (;;) {
      const int descriptor = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (descriptor < 0) return;
      {
        const MutexLock lock(mutex_);
        connections_.insert(descriptor);
      }
      threads_.emplace_back([this, descriptor] {
        serve(descriptor);
        const MutexLock lock(mutex_);
        connections_.erase(descriptor);
        close(descriptor);
      });
    }
  }
  void serve(int descriptor) {
    std::string text;
    char buffer[65536];
    for (;;) {
      const size_t end = text.find("\r\n\r\n");
      if (end != std::string::npos) {
        const size_t length = std::stoul(text.substr(text.find("Content-Length: ") + 16));
        if (text.size() >= end + 4 + length) {
          ++num_requests_;
          const Json request = length > 0 ? Json::parse(text.substr(end + 4, length)) : Json();
          return handler_({descriptor, text.substr(0, end), request});
        }
      }
      const ssize_t n = recv(descriptor, buffer, sizeof buffer, 0);
      if (n <= 0) return;
      text.append(buffer, static_cast<size_t>(n));
    }
  }

  Handler handler_;
  int listener_ = -1;
  uint16_t port_ = 0;
  std::atomic<int64_t> num_requests_ = 0;
  Mutex mutex_;
  std::set<int> connections_ GUARDED_BY(mutex_);  // open
  std::thread accepting_;
  std::vector<std::thread> threads_;
};

// A connection to 127.0.0.1. A read fails after 20 seconds.
class RawClient {
 public:
  explicit RawClient(int port, int receive_buffer = 0) : descriptor_(socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_buffer > 0)
      setsockopt(descriptor_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    BOUGH_CHECK(connect(descriptor_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0, "connect");
  }
  ~RawClient() { close(); }
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  void close() {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
  }
  // Returns false if the server has closed the connection.
  bool send(std::string_view text) const {
    while (!text.empty()) {
      const ssize_t n = ::send(descriptor_, text.data(), text.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      text.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }
  bool post(const std::string& path, const std::string& body) const {
    return send(str("POST ", path, " HTTP/1.1\r\nHost: localhost\r\nContent-Length: ", body.size(),
                    "\r\n\r\n", body));
  }
  // Reads until `end` arrives or the connection ends.
  std::string read_until(const std::string& end) {
    while (text_.find(end) == std::string::npos && read_some()) {
    }
    const size_t length = std::min(
        text_.size(), text_.find(end) == std::string::npos ? text_.size() : text_.find(end) + end.size());
    const std::string out = text_.substr(0, length);
    text_.erase(0, length);
    return out;
  }
  std::string read_all() {
    while (read_some()) {
    }
    return std::exchange(text_, {});
  }

 private:
  bool read_some() {
    pollfd watched{descriptor_, POLLIN, 0};
    if (poll(&watched, 1, 20000) <= 0) return false;
    std::array<char, 4096> buffer;
    const ssize_t n = recv(descriptor_, buffer.data(), buffer.size(), 0);
    if (n <= 0) return false;
    text_.append(buffer.data(), static_cast<size_t>(n));
    return true;
  }
  int descriptor_;
  std::string text_;
};

// Waits up to about 20 seconds for a condition that another thread makes true. Returns whether it came true.
template <class Condition>
bool eventually(const Condition& condition) {
  for (int i = 0; i < 20000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace bough

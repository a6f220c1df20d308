// What tests of processes and endpoints share.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/json.h"
#include "env/environment.h"

namespace bough {

inline bool is_running(pid_t pid) {
  std::string state;
  if (std::ifstream stat(str("/proc/", pid, "/stat")); stat) std::getline(stat, state);
  return !state.empty() && state.find(") Z ") == std::string::npos;
}

// Processes that have this text among their arguments, which tells them from all others: their own numbers
// are others inside a PID namespace.
inline std::vector<pid_t> processes_with(const std::string& text) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const auto pid = static_cast<pid_t>(std::strtol(entry.path().filename().c_str(), nullptr, 10));
    if (pid <= 0 || pid == getpid()) continue;
    std::ifstream file(entry.path() / "cmdline");
    const std::string arguments{std::istreambuf_iterator<char>(file), {}};
    if (arguments.find(text) != std::string::npos && is_running(pid)) found.push_back(pid);
  }
  return found;
}

// Asked until it is not there once: a program that starts another is without arguments for a moment.
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

// Holds conversations with an environment: a folder, settings, and an inbox.
class EpisodeTest : public testing::Test {
 protected:
  EpisodeTest() : folder_(std::filesystem::path(testing::TempDir()) / str("bough_environment_", getpid())) {
    std::filesystem::create_directories(folder_);
    settings_.workers = 4;
    settings_.timeout_seconds = 30;  // a machine under load must not turn slow answers into failed ones
  }
  ~EpisodeTest() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& code) {
    std::ofstream(folder_ / name) << code;
    return (folder_ / name).string();
  }
  static Problem problem(int64_t from, Json fields = Json::object()) {
    return {str("p", from), "", {}, str(from), std::move(fields)};
  }
  static Action says(const std::string& word) { return {.text = word, .content = word}; }
  static Action calls(const std::string& name, OrderedJson arguments = OrderedJson::object()) {
    return {.text = name, .calls = {{"c1", name, std::move(arguments)}}};
  }
  uint64_t begin(Environment& environment, const Problem& problem) {
    return environment.begin(problem, 5, inbox_);
  }
  EpisodeReply wait() {
    for (int i = 0; i < 600; ++i) {
      if (replies_.empty())
        for (EpisodeReply& reply : inbox_->take(std::chrono::milliseconds(100)))
          replies_.push_back(std::move(reply));
      if (replies_.empty()) continue;
      EpisodeReply reply = std::move(replies_.front());
      replies_.pop_front();
      return reply;
    }
    ADD_FAILURE() << "no answer";
    return {};
  }
  // A conversation of its own with one turn.
  EpisodeReply take_turn(Environment& environment, const Action& action) {
    const uint64_t episode = begin(environment, problem(3));
    const EpisodeReply opened = wait();
    EXPECT_EQ(opened.failure, EpisodeFailure::kNone) << opened.message;
    environment.step(episode, action);
    EpisodeReply reply = wait();
    environment.end(episode);
    return reply;
  }
  EpisodeReply say(Environment& environment, const std::string& word) {
    return take_turn(environment, says(word));
  }
  std::string error_of() {
    try {
      make_environment(settings_);
    } catch (const UserError& error) {
      return error.what();
    }
    return "no error";
  }

  std::filesystem::path folder_;
  EnvironmentSettings settings_;
  std::shared_ptr<EpisodeInbox> inbox_ = std::make_shared<EpisodeInbox>();
  std::deque<EpisodeReply> replies_;
};

// A server of 127.0.0.1 that answers each connection by a function, on a thread of its own.
class Endpoint {
 public:
  struct Connection {
    int descriptor;
    std::string head;  // of the request
    Json request;

    // False: the other side has hung up.
    bool send(const std::string& text) const {
      return ::send(descriptor, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
    }
    void answer(const std::string& body, const std::string& status = "200 OK") const {
      send(str("HTTP/1.1 ", status, "\r\nContent-Type: application/json\r\nContent-Length: ", body.size(),
               "\r\nConnection: close\r\n\r\n", body));
    }
    // Returns when the other side hangs up.
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
      threads_.emplace_back([this, descriptor] {
        serve(descriptor);
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
  std::thread accepting_;
  std::vector<std::thread> threads_;
};

}  // namespace bough

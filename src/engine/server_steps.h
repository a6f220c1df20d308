// Consecutive calls to one server: the next call begins when the one before has succeeded.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/server_api.h"
#include "net/http_client.h"

namespace bough {

// Does not block.
class ServerSteps {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // Begins the first call. After `deadline` the steps end with an error.
  ServerSteps(std::unique_ptr<HttpCall> call, std::vector<ServerCall> calls, Time deadline)
      : call_(std::move(call)), calls_(std::move(calls)), deadline_(deadline) {
    begin();
  }

  int descriptor() const { return call_->descriptor(); }
  bool wants_to_send() const { return call_->wants_to_send(); }
  bool is_done() const { return next_ == calls_.size() || !error_.empty(); }
  const std::string& error() const { return error_; }  // empty if there was no error
  bool is_refused() const { return is_refused_; }      // asking again would not help
  const Json& last_answer() const { return answer_; }
  void advance();

 private:
  void begin();
  void go_on();

  const std::unique_ptr<HttpCall> call_;
  const std::vector<ServerCall> calls_;
  const Time deadline_;
  size_t next_ = 0;
  std::optional<Time> waits_until_;
  Json answer_;
  std::string error_;
  bool is_refused_ = false;
};

// Blocks until all steps are done. They end, because each has a deadline.
void finish_all(const std::vector<ServerSteps*>& all);

}  // namespace bough

// Helpers for tests of environments and of sandboxed programs.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/error.h"
#include "base/json.h"
#include "env/environment.h"
#include "env/sandbox.h"
#include "net/net_test_util.h"

namespace bough {

inline SandboxSettings allowing_unsandboxed() {
  SandboxSettings settings;
  settings.allow_unsandboxed = true;
  return settings;
}

// Why programs cannot run in a sandbox on this machine. "" if they can.
inline const std::string& no_sandbox() {
  static const std::string why = Sandbox(allowing_unsandboxed()).why_not();
  return why;
}

#define NEEDS_SANDBOX() \
  if (!no_sandbox().empty()) GTEST_SKIP() << "no sandbox on this machine: " << no_sandbox()

// A test that runs conversations with an environment. It has a folder, settings and a reply queue.
class EpisodeTest : public testing::Test {
 protected:
  EpisodeTest() : folder_(std::filesystem::path(testing::TempDir()) / str("bough_environment_", getpid())) {
    std::filesystem::create_directories(folder_);
    settings_.workers = 4;
    settings_.timeout_seconds = 30;  // long, so that slow answers on a machine under load do not fail
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
    return environment.begin(problem, 5, reply_queue_);
  }
  EpisodeReply wait() {
    for (int i = 0; i < 600; ++i) {
      if (replies_.empty())
        for (EpisodeReply& reply : reply_queue_->take(std::chrono::milliseconds(100)))
          replies_.push_back(std::move(reply));
      if (replies_.empty()) continue;
      EpisodeReply reply = std::move(replies_.front());
      replies_.pop_front();
      return reply;
    }
    ADD_FAILURE() << "no answer";
    return {};
  }
  // Runs a new conversation with one turn. Returns the reply to the turn.
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
  std::shared_ptr<ReplyQueue> reply_queue_ = std::make_shared<ReplyQueue>();
  std::deque<EpisodeReply> replies_;
};

}  // namespace bough

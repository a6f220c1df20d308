#include "run/engine_process.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "run/engine_messages.h"

namespace bough {

namespace {

constexpr int kAbortCheckMilliseconds = 100;
// How long a process that closed its connection may take to exit. Its exit status then says why it ended.
constexpr auto kGrace = std::chrono::seconds(2);

struct EngineDied : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A message is its length in 8 bytes, then CBOR.
std::string framed(const Json& json) {
  const std::string bytes = packed(json);
  const uint64_t length = bytes.size();
  std::string frame(sizeof length, '\0');
  std::memcpy(frame.data(), &length, sizeof length);
  return frame + bytes;
}

// Takes the first message of the received bytes, if it is complete.
std::optional<Json> take_message(std::string& heard) {
  uint64_t length = 0;
  if (heard.size() < sizeof length) return {};
  std::memcpy(&length, heard.data(), sizeof length);
  if (heard.size() - sizeof length < length) return {};
  Json message = unpacked(heard.substr(sizeof length, length));
  heard.erase(0, sizeof length + length);
  return message;
}

}  // namespace

// ---- The rank's side.

EngineProcess::EngineProcess(std::vector<std::string> command, Json job, Communicator& ranks,
                             PublicationRanks& publication, double answer_seconds)
    : command_(std::move(command)),
      job_(std::move(job)),
      ranks_(ranks),
      publication_(publication),
      answer_seconds_(answer_seconds) {
  ask({{"passes", 0}, {"running", false}, {"commands", Json::array()}});
}

Json EngineProcess::answer(const Json& message) {
  Json sent = message;
  for (Json& command : sent.at("commands")) {
    note(command);
    if (command.at("do") != "weights") continue;
    const auto version = command.at("version").get<int32_t>();
    // Rank 0 may repeat a version that the engine has. Otherwise arrived() is this version: a newer one is
    // not sent before the engine has this one.
    if (weights_->held().version < version) {
      await_weights([&] { return weights_->arrived().version >= version; }, version, ranks_);
      // The engine takes these weights only in ask() below. hold() may come before, because the engine
      // computes nothing in between.
      weights_->hold(weights_->arrived());
    }
    const BufferedVersion held = weights_->held();
    command["version"] = held.version;
    command["path"] = weights_->path(held);
  }
  Json reply = ask(std::move(sent));
  for (const Json& result : reply.at("results")) {
    const Json& id = result.at("id");
    std::erase_if(asked_, [&](const Asked& asked) { return asked.command.at("id") == id; });
  }
  if (!reply.at("results").empty()) in_a_row_ = 0;
  last_ = statistics_from_json(reply.at("statistics"));
  reply["statistics"] = to_json(lost_ + last_);
  reply["restarts"] = num_restarts_;
  reply["why"] = why_;
  return reply;
}

void EngineProcess::note(const Json& command) {
  const std::string name = command.at("do").get<std::string>();
  if (name == "submit") asked_.push_back({command, false});
  if (name == "cancel")
    for (Asked& asked : asked_) asked.is_cancelled |= asked.command.at("id") == command.at("id");
  if (name == "pause" || name == "resume") is_paused_ = name == "pause";
  if (name == "policy") policy_ = command;
  if (name == "park") parked_ = std::exchange(asked_, {});
  if (name == "unpark") asked_ = std::exchange(parked_, {});
  if (name == "park" || name == "unpark") is_parked_ = name == "park";
}

// All commands that bring another process to the state of this one.
Json EngineProcess::all_commands() const {
  Json commands = Json::array();
  const auto add = [&](const std::vector<Asked>& all) {
    for (const Asked& asked : all) {
      commands.push_back(asked.command);
      if (asked.is_cancelled) commands.push_back({{"do", "cancel"}, {"id", asked.command.at("id")}});
    }
  };
  if (const BufferedVersion held = weights_->held(); held.version >= 0)
    commands.push_back({{"do", "weights"}, {"version", held.version}, {"path", weights_->path(held)}});
  add(parked_);
  if (is_parked_) commands.push_back({{"do", "park"}});
  if (!policy_.is_null()) commands.push_back(policy_);
  add(asked_);
  if (is_paused_) commands.push_back({{"do", "pause"}});
  return commands;
}

Json EngineProcess::ask(Json message) {
  while (true) {
    try {
      if (!process_) {
        start();
        message["commands"] = all_commands();
      }
      return exchange(message, answer_seconds_);
    } catch (const EngineDied& died) {
      why_ = died.what();
    }
    process_.reset();
    heard_.clear();
    lost_ = lost_ + std::exchange(last_, {});
    if (++in_a_row_ > kMostRestarts)
      throw IoError(str("the engine process of rank ", ranks_.rank(), " was started ", in_a_row_,
                        " times without finishing a request; the last one ", why_));
    ++num_restarts_;
  }
}

void EngineProcess::start() {
  process_ = std::make_unique<WorkerProcess>(command_);
  const auto bytes = exchange(job_, kAnswerSeconds).at("bytes").get<int64_t>();
  if (!weights_) weights_ = std::make_unique<ReceivedWeights>(publication_, bytes);
}

void EngineProcess::fail(std::chrono::milliseconds grace, const std::string& why) {
  const std::string end = process_->end(grace);
  throw EngineDied(why.empty() ? end : why);
}

Json EngineProcess::exchange(const Json& message, double within) {
  const std::string frame = framed(message);
  const auto start = std::chrono::steady_clock::now();
  const auto wait = [&](short event) {
    pollfd of_process = {.fd = process_->descriptor(), .events = event, .revents = 0};
    poll(&of_process, 1, kAbortCheckMilliseconds);
    ranks_.check_abort();
    if (seconds_since(start) > within)
      fail(std::chrono::milliseconds(0), str("did not answer for ", within, " s and was killed"));
  };
  for (size_t at = 0; at < frame.size();) {
    const auto sent = process_->send(std::string_view(frame).substr(at));
    if (!sent) fail(kGrace, "");
    at += *sent;
    if (at < frame.size()) wait(POLLOUT);
  }
  while (true) {
    if (const auto reply = take_message(heard_)) {
      if (!reply->contains("error")) return *reply;
      const auto error = reply->at("error").get<std::string>();
      if (reply->at("wrong_input").get<bool>()) throw UserError(error);
      fail(kGrace, str("failed with: ", error));
    }
    const size_t before = heard_.size();
    const bool is_open = process_->receive(heard_);
    if (heard_.size() > before) continue;
    if (!is_open) fail(kGrace, "");
    wait(POLLIN);
  }
}

// ---- The engine process's side.

namespace {

struct Closed {};

// The connection to the process that started this one: stdin, which is a socket. Output to stdout goes to
// stderr.
class Channel {
 public:
  Channel() : socket_(dup(STDIN_FILENO)) { dup2(STDERR_FILENO, STDOUT_FILENO); }
  ~Channel() { close(socket_); }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  Json hear() {
    while (true) {
      if (auto message = take_message(heard_)) return *message;
      char buffer[1 << 16];
      const ssize_t count = recv(socket_, buffer, sizeof buffer, 0);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) throw Closed();
      heard_.append(buffer, static_cast<size_t>(count));
    }
  }

  void say(const Json& message) {
    const std::string frame = framed(message);
    for (size_t at = 0; at < frame.size();) {
      const ssize_t count = send(socket_, frame.data() + at, frame.size() - at, MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) throw Closed();
      at += static_cast<size_t>(count);
    }
  }

 private:
  const int socket_;
  std::string heard_;
};

}  // namespace

void run_engine_process(const std::function<void(const Json& job, const ServeEngine& serve)>& with_engine) {
  std::ofstream("/proc/self/oom_score_adj") << 500;  // of at most 1000
  Channel channel;
  const auto serve = [&](Engine& engine, Model& model, bool in_place, Changing changing) {
    MappedWeights weights(model, in_place, changing);
    channel.say({{"bytes", weights.num_bytes()}});
    const auto take = [&](const Json& command) {
      return weights.take(command.at("version").get<int32_t>(), command.at("path").get<std::string>());
    };
    while (true) channel.say(answer(channel.hear(), engine, take));
  };
  const auto say_error = [&](const std::exception& error, bool wrong_input) {
    channel.say({{"error", error.what()}, {"wrong_input", wrong_input}});
  };
  try {
    try {
      with_engine(channel.hear(), serve);
    } catch (const UserError& error) {
      say_error(error, true);
    } catch (const std::exception& error) {
      say_error(error, false);
    }
  } catch (const Closed&) {  // the process that started this one has ended
  }
}

}  // namespace bough

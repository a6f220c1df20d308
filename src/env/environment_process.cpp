#include "env/environment_process.h"

#include <utility>

#include "base/error.h"
#include "env/process_reward.h"
#include "env/python_worker_script.h"
#include "net/worker_protocol.h"

namespace bough {

namespace {

// If a command's first process still runs after this time, the command counts as usable, as in
// process_reward.cpp.
constexpr std::chrono::milliseconds kEnvironmentSettling{200};

ChannelReply broken_protocol(std::string why) {
  return {.kind = ChannelReply::kBroken, .failure = EpisodeFailure::kProtocol, .message = std::move(why)};
}

class EpisodeProcess final : public EpisodeChannel {
 public:
  EpisodeProcess(const std::vector<std::string>& arguments, bool in_namespace)
      : process_(arguments, in_namespace) {}

  void begin(const EpisodeCall& call) override {
    num_calls_ = call.num_calls();
    is_asked_ = true;
    process_.send(write_request(++request_, request_of(call)));
  }
  AfterClose close() override {
    process_.send(R"({"method": "close"})");
    return AfterClose::kFree;
  }
  int descriptor() const override { return process_.descriptor(); }
  bool wants_to_send() const override { return process_.wants_to_send(); }

  std::optional<ChannelReply> advance() override {
    if (const auto line = process_.advance()) return read(*line);
    return broken_reply(process_);
  }

 private:
  ChannelReply read(const std::string& line) {
    const auto reply = read_message<OrderedJson>(line);
    if (!reply) return broken_protocol(str("it answered ", quoted(line), ", which is not a JSON object"));
    const std::string error = shortened(reply->error.value_or("it says that it is not ready"));
    if (reply->has_ready)
      return reply->ready.value_or(false) ? ChannelReply{.kind = ChannelReply::kReady}
                                          : broken_protocol(error);
    if (!is_asked_ || reply->id != request_)
      return broken_protocol(str("it answered ", quoted(line), ", which answers no open request"));
    is_asked_ = false;
    if (reply->error)
      return {.kind = ChannelReply::kFailed, .failure = EpisodeFailure::kError, .message = error};
    try {
      return {.kind = ChannelReply::kAnswer, .observation = read_observation(reply->object, num_calls_)};
    } catch (const Malformed& malformed) {
      return broken_protocol(shortened(malformed.what()));
    }
  }

  LineProcess process_;
  int64_t request_ = 0;
  size_t num_calls_ = 0;   // calls in the current request
  bool is_asked_ = false;  // the request is not answered yet
};

}  // namespace

std::optional<ChannelReply> broken_reply(LineProcess& process) {
  const auto end = process.end();
  if (!end) return std::nullopt;
  if (end->overflowed)
    return broken_protocol(str("its answer has more than ", kMaxReplyBytes, " bytes without a line break"));
  return ChannelReply{.kind = ChannelReply::kBroken, .failure = EpisodeFailure::kCrash, .message = end->how};
}

std::unique_ptr<Environment> make_process_environment(const EnvironmentSettings& settings, PoolTime time) {
  WorkerPoolOptions options;
  std::vector<std::string> arguments;
  if (settings.type == "python") {
    const PythonFunction found = parse_python_function(settings.path, "environment.path",
                                                       "FILE.py:CLASS such as my_env.py:MyEnvironment");
    options = {.name = settings.path, .announces_ready = true, .time = time};
    arguments = {find_python(settings.python),
                 "-u",
                 "-c",
                 str(kPythonWorkerStart, kPythonEnvironmentWorker),
                 found.file,
                 found.name};
  } else {
    options = {.name = settings.command, .settling = kEnvironmentSettling, .time = time};
    arguments = {"/bin/sh", "-c", settings.command};
  }
  return make_environment_pool(options, settings, [arguments, in_namespace = can_make_pid_namespaces()] {
    return std::make_unique<EpisodeProcess>(arguments, in_namespace);
  });
}

}  // namespace bough

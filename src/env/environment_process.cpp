#include "env/environment_process.h"

#include <utility>

#include "base/error.h"
#include "env/process_reward.h"
#include "env/python_worker_script.h"

namespace bough {

namespace {

// As of rewards (process_reward.cpp): a first process that is there after a moment can be run, and one that
// closed its end is given another moment to be gone.
constexpr std::chrono::milliseconds kSettling{200}, kExitGrace{200};

ChannelReply broken_protocol(std::string why) {
  return {.kind = ChannelReply::kBroken, .failure = EpisodeFailure::kProtocol, .message = std::move(why)};
}

class ProcessChannel final : public EpisodeChannel {
 public:
  ProcessChannel(const std::vector<std::string>& arguments, bool in_namespace)
      : process_(arguments, in_namespace) {}

  void begin(const EpisodeCall& call) override {
    OrderedJson request = request_of(call);
    request["id"] = ++request_;
    num_calls_ = call.num_calls();
    is_asked_ = true;
    process_.send(dump_ordered(request));
  }
  AfterClose close() override {
    process_.send(R"({"method": "close"})");
    return AfterClose::kFree;
  }
  int descriptor() const override { return process_.descriptor(); }
  bool wants_to_send() const override { return process_.wants_to_send(); }

  std::optional<ChannelReply> advance() override {
    process_.advance();
    if (const auto line = process_.next()) return read(*line);
    return process_.broken();
  }

 private:
  ChannelReply read(const std::string& line) {
    const OrderedJson reply = OrderedJson::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!reply.is_object())
      return broken_protocol(str("it answered ", quoted(line), ", which is no JSON object"));
    const auto error = reply.find("error");
    const bool has_error = error != reply.end();
    const std::string text = !has_error           ? ""
                             : error->is_string() ? error->get<std::string>()
                                                  : dump_ordered(*error);
    if (const auto ready = reply.find("ready"); ready != reply.end()) {
      if (ready->is_boolean() && ready->get<bool>()) return {.kind = ChannelReply::kReady};
      return broken_protocol(has_error ? shortened(text) : "it says that it is not ready");
    }
    const auto id = reply.find("id");
    if (!is_asked_ || id == reply.end() || !id->is_number_integer() || id->get<int64_t>() != request_)
      return broken_protocol(str("it answered ", quoted(line), ", which nobody asked"));
    is_asked_ = false;
    if (has_error)
      return {.kind = ChannelReply::kFailed, .failure = EpisodeFailure::kError, .message = shortened(text)};
    try {
      return {.kind = ChannelReply::kAnswer, .observation = read_observation(reply, num_calls_)};
    } catch (const Malformed& malformed) {
      return broken_protocol(shortened(malformed.what()));
    }
  }

  LineProcess process_;
  int64_t request_ = 0;
  size_t num_calls_ = 0;   // of the request
  bool is_asked_ = false;  // it has not been answered
};

}  // namespace

void LineProcess::advance() {
  if (!outgoing_.empty()) {
    const auto sent = process_.send(outgoing_);
    if (sent) outgoing_.erase(0, *sent);
    else outgoing_.clear();  // the end of its stream, read below, says how it ended
  }
  std::string bytes;
  if (is_open_) is_open_ = process_.receive(bytes);
  incoming_.append(bytes);
}

std::optional<ChannelReply> LineProcess::broken() {
  if (incoming_.overflowed())
    return broken_protocol(str("its answer has more than ", kMaxReplyBytes, " bytes without a line break"));
  if (is_open_) return std::nullopt;
  return ChannelReply{.kind = ChannelReply::kBroken,
                      .failure = EpisodeFailure::kCrash,
                      .message = "the worker " + process_.end(kExitGrace)};
}

std::unique_ptr<Environment> make_process_environment(const EnvironmentSettings& settings) {
  EnvironmentPoolOptions options;
  std::vector<std::string> arguments;
  if (settings.type == "python") {
    const PythonFunction found = parse_python_function(settings.path, "environment.path",
                                                       "FILE.py:CLASS such as my_env.py:MyEnvironment");
    options = {.name = settings.path, .announces_ready = true};
    arguments = {find_python(settings.python),
                 "-u",
                 "-c",
                 str(kPythonWorkerStart, kPythonEnvironmentWorker),
                 found.file,
                 found.name};
  } else {
    options = {.name = settings.command, .settling = kSettling};
    arguments = {"/bin/sh", "-c", settings.command};
  }
  return make_environment_pool(options, settings, [arguments, in_namespace = can_make_pid_namespaces()] {
    return std::make_unique<ProcessChannel>(arguments, in_namespace);
  });
}

}  // namespace bough

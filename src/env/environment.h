// Environments answer the turns of a model in a conversation. Each conversation is an episode with three
// kinds of calls:
// - begin: the environment opens the episode with messages and tools (its reset).
// - step: the environment answers a turn of the model with messages and a reward, and says whether the
//   episode is over.
// - end: the caller says that it will not continue the episode.
//
//   environment: {type: calculator}                          built in: calculator, guess
//   environment: {type: python, path: my_env.py:MyEnv}       a Python class, in worker processes
//   environment: {type: command, command: ./my_env}          any program that answers lines of JSON
//   environment: {type: http, url: http://host:8000/env}     an endpoint that answers the same JSON
//   environment: {type: mcp, command: ./my_server}           the tools of an MCP server (stdio)
//
// All calls return without waiting. A thread of the environment posts the results of begin() and step() to
// the episode's reply queue. So hundreds of episodes can wait for tools while an engine generates for other
// episodes. An episode may have only one call without a reply. If a call fails (exception, hang, crash,
// malformed answer), its reply has an EpisodeFailure and the episode is over. Other episodes are not
// affected.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "base/mutex.h"
#include "base/settings.h"
#include "data/problems.h"

namespace bough {

struct EnvironmentSettings {
  std::string type;
  std::string path;
  std::string command;
  std::string url;
  std::string server = "conversation";
  int64_t max_turns = 16;
  int64_t max_tokens = 0;
  int64_t max_context = 0;
  int64_t max_invalid_calls = 4;
  int64_t max_tool_response_length = 16384;
  std::string tool_response_truncate_side = "middle";
  std::string tool_call_parser = "auto";
  std::string reasoning_parser;
  std::string chat_template_kwargs;
  int64_t workers = 64;
  double timeout_seconds = 60;
  double startup_timeout_seconds = 120;
  int64_t retries = 1;
  std::string python;

  template <class V>
  void visit(V& v) {
    v("type", type, "kind of environment; empty: none, conversations have one turn",
      one_of({"", "calculator", "guess", "python", "command", "http", "mcp"}));
    v("path", path, "Python class of type python, FILE.py:CLASS");
    v("command", command,
      "shell command that answers lines of JSON (type command) or is an MCP server (type mcp)");
    v("url", url, "http://HOST:PORT/PATH of an endpoint that answers POSTs of JSON (type http)");
    v("server", server, "MCP servers: one for each conversation, one for each worker, or one for the run",
      one_of({"conversation", "worker", "run"}));
    v("max_turns", max_turns, "maximum turns of the model in a conversation", range(1, 4096));
    v("max_tokens", max_tokens, "maximum tokens of the model in all turns of a conversation; 0: no limit",
      at_least(0));
    v("max_context", max_context,
      "maximum tokens of a conversation, messages included; 0: the model's context length", at_least(0));
    v("max_invalid_calls", max_invalid_calls,
      "maximum invalid calls of a conversation, each answered with the error; one more ends it", at_least(0));
    v("max_tool_response_length", max_tool_response_length,
      "maximum bytes of a message of the environment; longer ones are cut; 0: no limit", at_least(0));
    v("tool_response_truncate_side", tool_response_truncate_side, "part that is cut from a long message",
      one_of({"left", "middle", "right"}));
    v("tool_call_parser", tool_call_parser,
      "format of the model's tool calls (docs/chat.md); auto: the one whose markers the chat template has; "
      "empty: no tools");
    v("reasoning_parser", reasoning_parser,
      "format of the model's reasoning (docs/chat.md); empty: no reasoning");
    v("chat_template_kwargs", chat_template_kwargs,
      "JSON object with settings of the chat template, such as {\"enable_thinking\": false}");
    v("workers", workers,
      "maximum conversations open outside of this process; an evaluation may open as many more",
      range(1, 65536));
    v("timeout_seconds", timeout_seconds,
      "time limit of one answer, in seconds; then the conversation ends and its process is killed",
      range(0.001, 86400));
    v("startup_timeout_seconds", startup_timeout_seconds,
      "time limit in seconds until a process or an endpoint is ready", range(0.1, 86400));
    v("retries", retries, "retries of opening a conversation if its process or connection failed",
      range(0, 100));
    v("python", python, "Python interpreter; empty: the same as reward_service.python");
  }
  void check() const;  // throws UserError if a setting that `type` needs is missing, or one does not fit it

  // Whether a conversation begins with the problem's prompt or messages. Other environments may open it with
  // messages of their own.
  bool begins_with_problem() const { return type.empty() || type == "mcp"; }

  // Whether the setting `reward` scores the rollouts. True without an environment, if the environment gives
  // no reward (mcp), or if the user set `reward`. Otherwise the environment's rewards count. The default
  // verifier may not understand the answers that the environment expects.
  bool is_scored_by_reward(bool reward_is_set) const {
    return type.empty() || type == "mcp" || reward_is_set;
  }
};

struct EnvironmentCall {
  std::string id, name;
  OrderedJson arguments = OrderedJson::object();
};

// A turn of the model, parsed.
struct Action {
  std::string text;  // the whole turn
  std::string content, reasoning;
  std::vector<EnvironmentCall> calls;  // the calls that could be parsed
};

// An environment's answer.
struct Observation {
  OrderedJson messages = OrderedJson::array();  // for the model, in the format of OpenAI's chat API
  OrderedJson tools;                            // from reset: null, or an array of function schemas
  std::optional<double> reward;                 // of this turn; a conversation's is the sum over its turns
  std::map<std::string, double> rewards;        // named parts of `reward`, also summed over the turns
  int64_t invalid_calls = 0;                    // calls of this turn that the environment did not accept
  bool done = false;
};

// Why an episode failed. failure_name() is also the reason that the conversation reports for its end.
enum class EpisodeFailure { kNone, kError, kTimeout, kCrash, kProtocol, kStart };
const char* failure_name(EpisodeFailure failure);  // environment_error, environment_timeout, ...

struct EpisodeReply {
  uint64_t episode = 0;
  Observation observation;
  EpisodeFailure failure = EpisodeFailure::kNone;
  std::string message;  // describes the failure
};

// The reply queue of a caller of an environment. Thread-safe.
class ReplyQueue {
 public:
  void post(EpisodeReply reply);
  // Removes and returns all posted replies, oldest first. If there are none, waits up to `at_most` for the
  // first one. Returns an empty list if none comes.
  std::vector<EpisodeReply> take(std::chrono::microseconds at_most);

 private:
  Mutex mutex_;
  CondVar posted_;
  std::vector<EpisodeReply> replies_ GUARDED_BY(mutex_);
};

class Environment {
 public:
  virtual ~Environment() = default;  // stops its threads and processes; no reply is posted afterwards

  // Opens an episode and returns its unique number. All random choices of the environment are a function of
  // `seed` and the problem.
  virtual uint64_t begin(const Problem& problem, uint64_t seed, std::shared_ptr<ReplyQueue> reply_queue) = 0;
  // Sends the model's turn. Must come after the reply to the episode's last call.
  virtual void step(uint64_t episode, const Action& action) = 0;
  // Releases an episode that is over, has failed, or that the caller does not continue. A call without a
  // reply may then get none.
  virtual void end(uint64_t episode) = 0;

  // The most episodes that one caller (a run, or its evaluation) may have begun and not ended. With more, a
  // caller that waits for the replies of all its episodes could wait forever.
  virtual int64_t max_open() const { return std::numeric_limits<int64_t>::max(); }

  // Throws UserError if the environment could never handle this data set.
  virtual void check(const Dataset& dataset) const {}
};

// The state of one conversation, for an environment written in C++. Used by one thread at a time.
class Episode {
 public:
  virtual ~Episode() = default;
  // An exception from either function fails the episode.
  virtual Observation reset(const Problem& problem, uint64_t seed) = 0;
  virtual Observation step(const Action& action) = 0;
};

// Runs environments written in C++ on `threads` threads of its own.
class ThreadedEnvironment final : public Environment {
 public:
  using Make = std::function<std::unique_ptr<Episode>()>;
  ThreadedEnvironment(Make make, int64_t threads);
  ~ThreadedEnvironment() override;

  uint64_t begin(const Problem& problem, uint64_t seed, std::shared_ptr<ReplyQueue> reply_queue) override;
  void step(uint64_t episode, const Action& action) override;
  void end(uint64_t episode) override;

 private:
  struct Running {
    std::shared_ptr<Episode> world;
    std::shared_ptr<ReplyQueue> reply_queue;
  };
  void post(uint64_t episode, std::function<Observation(Episode&)> work);
  void run();

  const Make make_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> queue_ GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, Running> episodes_ GUARDED_BY(mutex_);
  uint64_t next_ GUARDED_BY(mutex_) = 0;
  bool is_ending_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

// Makes the environment of a setting. Blocks until a first process or server is ready, or an endpoint has
// accepted a connection. Throws UserError if the environment cannot be used, and IoError if an endpoint
// cannot be reached.
std::unique_ptr<Environment> make_environment(const EnvironmentSettings& settings);

// A function schema in the format of OpenAI's API. `parameters` maps names to JSON schemas; all are required.
OrderedJson function_tool(const std::string& name, const std::string& description, OrderedJson parameters);
// A problem in the form that environments outside of this process receive: its record from the data set, with
// `id`, `answer`, and `prompt` or `messages`.
OrderedJson problem_json(const Problem& problem);

}  // namespace bough

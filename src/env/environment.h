// Environments: what a model holds a conversation of several turns with. Each conversation is an episode: the
// environment opens it with messages and tools (reset), answers each turn of the model with messages, reward
// and whether it is over (step), and is told when nobody goes on with it (end).
//
//   environment: {type: calculator}                          built in: calculator, guess
//   environment: {type: python, path: my_env.py:MyEnv}       a Python class, in worker processes
//   environment: {type: command, command: ./my_env}          any program that answers lines of JSON
//   environment: {type: http, url: http://host:8000/env}     an endpoint that answers the same
//   environment: {type: mcp, command: ./my_server}           the tools of an MCP server (stdio)
//
// All calls return at once. What comes of begin() and step() is posted to the episode's inbox by a thread of
// the environment: hundreds of episodes wait for tools while an engine generates for others. An episode has
// one call at a time. One that fails (an exception, a hang, a crash, an answer that is none) says so with a
// reason of its own, and is over; others go on.
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

// Objects keep the order of their keys: chat templates show them to the model as they come.
using OrderedJson = nlohmann::ordered_json;

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
  std::string tool_call_parser = "hermes";
  std::string reasoning_parser;
  std::string chat_template_kwargs;
  int64_t workers = 64;
  double timeout_seconds = 60;
  double startup_timeout_seconds = 120;
  int64_t retries = 1;
  std::string python;

  template <class V>
  void visit(V& v) {
    v("type", type, "calculator, guess, python, command, http or mcp; empty: prompts of one turn",
      one_of({"", "calculator", "guess", "python", "command", "http", "mcp"}));
    v("path", path, "FILE.py:CLASS, of type python");
    v("command", command, "a shell command that answers lines of JSON, or an MCP server's");
    v("url", url, "http://HOST:PORT/PATH that answers the same, of type http");
    v("server", server, "an MCP server for each conversation, for each worker, or one for the run",
      one_of({"conversation", "worker", "run"}));
    v("max_turns", max_turns, "a conversation ends after this many turns of the model", range(1, 4096));
    v("max_tokens", max_tokens, "and after this many tokens of the model, all turns; 0: no bound",
      at_least(0));
    v("max_context", max_context, "and when it has this many tokens, all told; 0: what the model takes",
      at_least(0));
    v("max_invalid_calls", max_invalid_calls,
      "and after more calls than this that could not be read; each is answered with what was wrong",
      at_least(0));
    v("max_tool_response_length", max_tool_response_length,
      "bytes of a message of the environment; a longer one is cut; 0: never", at_least(0));
    v("tool_response_truncate_side", tool_response_truncate_side, "where it is cut",
      one_of({"left", "middle", "right"}));
    v("tool_call_parser", tool_call_parser, "how the model writes calls (docs/chat.md); empty: it has none");
    v("reasoning_parser", reasoning_parser, "how it writes reasoning; empty: it has none");
    v("chat_template_kwargs", chat_template_kwargs,
      "JSON object of the template's own settings, such as {\"enable_thinking\": false}");
    v("workers", workers,
      "conversations outside of this process, and processes that hold one each; as many more for an "
      "evaluation",
      range(1, 65536));
    v("timeout_seconds", timeout_seconds,
      "limit of one answer; beyond it the conversation ends and its process is killed", range(0.001, 86400));
    v("startup_timeout_seconds", startup_timeout_seconds, "limit of what comes before the first answer",
      range(0.1, 86400));
    v("retries", retries, "further attempts at opening a conversation whose process died", range(0, 100));
    v("python", python, "interpreter; empty: as reward_service.python");
  }
  void check() const;  // UserError: type and what it needs do not go together

  // Whether the run's reward scores what comes of it: where there are no conversations, where their
  // environment gives no reward, or where somebody asked for it. A reward that nobody asked for need not
  // know what the environment's answers are.
  bool is_scored_by_reward(bool reward_is_set) const {
    return type.empty() || type == "mcp" || reward_is_set;
  }
};

struct EnvironmentCall {
  std::string id, name;
  OrderedJson arguments = OrderedJson::object();
};

// A turn of the model, taken apart.
struct Action {
  std::string text;  // all of it
  std::string content, reasoning;
  std::vector<EnvironmentCall> calls;  // those that could be read
};

// What an environment answers.
struct Observation {
  OrderedJson messages = OrderedJson::array();  // for the model, as OpenAI's chat API has them
  OrderedJson tools;                            // of reset: null, or an array of schemas of functions
  std::optional<double> reward;                 // of the turn; a trajectory's is the sum of its turns'
  std::map<std::string, double> rewards;        // its parts, by name; added up over the turns, too
  int64_t invalid_calls = 0;                    // of the turn: calls that the environment could not take
  bool done = false;
};

// Why an episode failed. Its name is the reason that a conversation ends with.
enum class EpisodeFailure { kNone, kError, kTimeout, kCrash, kProtocol, kStart };
const char* failure_name(EpisodeFailure failure);  // environment_error, environment_timeout, ...

struct EpisodeReply {
  uint64_t episode = 0;
  Observation observation;
  EpisodeFailure failure = EpisodeFailure::kNone;
  std::string message;  // of a failure
};

// Where replies wait for who asked.
class EpisodeInbox {
 public:
  void post(EpisodeReply reply);
  // What has come, oldest first. Where that is nothing it waits for the first reply, `at_most` so long.
  std::vector<EpisodeReply> take(std::chrono::microseconds at_most);

 private:
  Mutex mutex_;
  CondVar posted_;
  std::vector<EpisodeReply> replies_ GUARDED_BY(mutex_);
};

class Environment {
 public:
  virtual ~Environment() = default;  // everything that runs for it ends, and no reply comes any more

  // Opens an episode and returns its number, which no other has. `seed`: what the environment draws is a
  // function of it and the problem.
  virtual uint64_t begin(const Problem& problem, uint64_t seed, std::shared_ptr<EpisodeInbox> inbox) = 0;
  // The model's turn, after the reply to the call before.
  virtual void step(uint64_t episode, const Action& action) = 0;
  // Nobody goes on with it, or it has failed or is over. Of a call that runs no reply need come.
  virtual void end(uint64_t episode) = 0;

  // Episodes that whoever begins them may have open at once. More would wait for each other where all are
  // answered before any goes on.
  virtual int64_t max_open() const { return std::numeric_limits<int64_t>::max(); }

  // UserError where it could never take the data set.
  virtual void check(const Dataset& dataset) const {}
};

// The world of one conversation, in C++; computed by one thread at a time.
class Episode {
 public:
  virtual ~Episode() = default;
  // What they throw fails the episode.
  virtual Observation reset(const Problem& problem, uint64_t seed) = 0;
  virtual Observation step(const Action& action) = 0;
};

// Episodes in C++, on threads of its own.
class ThreadedEnvironment final : public Environment {
 public:
  using Make = std::function<std::unique_ptr<Episode>()>;
  ThreadedEnvironment(Make make, int64_t threads);
  ~ThreadedEnvironment() override;

  uint64_t begin(const Problem& problem, uint64_t seed, std::shared_ptr<EpisodeInbox> inbox) override;
  void step(uint64_t episode, const Action& action) override;
  void end(uint64_t episode) override;

 private:
  struct Running {
    std::shared_ptr<Episode> world;
    std::shared_ptr<EpisodeInbox> inbox;
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

// What the setting asks for, complete: processes are started, files imported. UserError: it cannot be had.
std::unique_ptr<Environment> make_environment(const EnvironmentSettings& settings);

// A schema of a function as OpenAI's API has it; `parameters` is name to JSON schema, all of them required.
OrderedJson function_tool(const std::string& name, const std::string& description, OrderedJson parameters);
OrderedJson message_of(const std::string& role, const std::string& content);
// The line of the data set, with `id`, `answer`, and `prompt` or `messages`: what others are told of a
// problem.
OrderedJson problem_json(const Problem& problem);

}  // namespace bough

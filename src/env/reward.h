// Rewards: one number for each finished completion.
//
//   reward: ""                        the task's verifier of the final number (verifier.h)
//   reward: NAME                      another built-in verifier (builtin_reward_names)
//   reward: my_reward.py:score        the user's Python function, in worker processes (process_reward.h)
//   reward: http://host:8000/score    an endpoint (http_reward.h)
//   reward:                           several, each with a name and a weight; the reward is the weighted sum
//     - {name: right, function: "my_reward.py:score"}
//     - {name: style, command: ./judge --strict, weight: 0.2}       a command that answers lines of JSON
//
// A reward fails on an exception, a hang, or a result that is no finite number. The result then has a message
// and the run goes on:
// - If `failure_reward` is set, it replaces the reward.
// - If not, the loss and the mean and deviation of the sample's group are computed without this sample.
// If one of several rewards fails, the sum fails. Callers of score_all() count failures as `reward/failures`
// and end the run after max_consecutive_failures in a row.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/settings.h"
#include "data/problems.h"
#include "data/trajectory.h"
#include "env/code_verifier.h"
#include "env/math_equality.h"
#include "env/verifier.h"

namespace bough {

// A completion to be scored. It refers to the caller's texts, which must live until the call returns. The
// texts may be invalid UTF-8, because a completion can end inside a character.
struct RewardRequest {
  std::string_view prompt;      // as the model saw it
  std::string_view completion;  // without the stop token
  const Problem* problem;       // never nullptr
};

struct RewardResult {
  double reward = 0;  // finite; failure_reward or 0 if it failed
  bool failed = false;
  std::string message;  // why it failed; else the verifier's reason, or ""
  bool valid = true;    // false: it failed and failure_reward is not set
  // Named rewards before weighting. Failed ones are missing.
  std::map<std::string, double> rewards;
};

// The result of a failed reward.
RewardResult failed_reward(std::optional<double> failure_reward, std::string message);

// Sets these fields of a sample: `rewards` and `valid`; `reward` if the result is valid; `reward_failure` if
// the reward failed.
void set_reward(Trajectory& sample, RewardResult result);

struct RewardSettings {
  int64_t workers = 2;
  double timeout_seconds = 15;
  int64_t retries = 1;
  bool retry_timeouts = false;
  double startup_timeout_seconds = 120;
  std::optional<double> failure_reward;
  int64_t max_consecutive_failures = 256;
  std::string python;
  VerifierSettings verifier;
  MathVerifierOptions math;
  CodeVerifierOptions code;

  template <class V>
  void visit(V& v) {
    v("workers", workers, "processes or connections that compute a reward in parallel", range(1, 1024));
    v("timeout_seconds", timeout_seconds,
      "time limit of one call, in seconds; a longer call fails and its worker is restarted",
      range(0.001, 86400));
    v("retries", retries,
      "retries of a call if its worker died, or its endpoint refused, disconnected or answered 5xx",
      range(0, 100));
    v("retry_timeouts", retry_timeouts, "also retry calls that took longer than timeout_seconds");
    v("startup_timeout_seconds", startup_timeout_seconds,
      "time limit in seconds until a worker is ready (file imported, ready line written, endpoint reached)",
      range(0.1, 86400));
    v("failure_reward", failure_reward,
      "reward of a failed call; null: the sample is left out of its group's mean and of the loss");
    v("max_consecutive_failures", max_consecutive_failures,
      "number of failed rewards in a row that ends the run", range(1, 1'000'000'000));
    v("python", python,
      "Python interpreter; empty: $BOUGH_PYTHON, else the installation's .venv, else python3");
    v("verifier", verifier, "verifier of the final number, the default reward");
    v("math", math, "settings of the verifier math");
    v("code", code, "settings of the verifier code");
  }
};

// One of the rewards of a run. Exactly one of function, command, url and verifier must be set.
struct RewardEntry {
  std::string name;
  std::string function;
  std::string command;
  std::string url;
  std::string verifier;
  double weight = 1;
  std::optional<int64_t> workers;
  std::optional<double> timeout_seconds;
  bool ready_line = false;

  template <class V>
  void visit(V& v) {
    v("name", name, "name in the metrics, reward/NAME/...; empty: the function's or the verifier's name");
    v("function", function, "Python function, FILE.py:FUNCTION");
    v("command", command, "shell command that answers lines of JSON (docs/add_a_reward.md)");
    v("url", url, "http://HOST:PORT/PATH of an endpoint that answers POSTs of JSON");
    v("verifier", verifier, "name of a built-in verifier");
    v("weight", weight, "factor in the sum of the rewards; 0: only recorded", range(-1e6, 1e6));
    v("workers", workers, "like reward_service.workers, for this reward; null: the same", range(1, 1024));
    v("timeout_seconds", timeout_seconds,
      "like reward_service.timeout_seconds, for this reward; null: the same", range(0.001, 86400));
    v("ready_line", ready_line, "the command writes the line {\"ready\": true} when it has loaded");
  }
  void check() const;

  // The short form of an entry: a built-in verifier's name, http://..., or FILE.py:FUNCTION. to_text()
  // returns nullopt if the entry has no short form.
  static RewardEntry from_text(const std::string& text);
  std::optional<std::string> to_text() const;

  // The given name, or the default: the function's or the verifier's name. "" for a command or a URL.
  std::string metric_name() const;
};

// The setting `reward`; empty: the verifier of the final number.
using RewardEntries = std::vector<RewardEntry>;

class RewardFunction {
 public:
  virtual ~RewardFunction() = default;

  // Returns a result for each request, in order. Thread-safe: requests of several threads are scored in
  // parallel, at most one per worker at a time. Each call returns when its own requests are done. Failed
  // rewards are results; only a broken invariant throws.
  virtual std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) = 0;

  // Ends scoring, from any thread. Running, waiting and all later calls return soon, with failed results.
  virtual void cancel() {}

  RewardResult score(const RewardRequest& request) { return score_all(std::span(&request, 1)).front(); }

  // Throws UserError if this function could never score the data set, for example because a reference answer
  // is no number. Then a run ends at its start and not after hours.
  virtual void check(const Dataset& dataset) const {}
};

// The default verifier, of the final number (verifier.h): reward 1 or 0.
class VerifierReward : public RewardFunction {
 public:
  explicit VerifierReward(const RewardSettings& settings = {});
  std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) override;
  void check(const Dataset& dataset) const override;

 private:
  NumberVerifier verifier_;
  std::optional<double> failure_reward_;
};

// The built-in verifiers. make_builtin_reward throws UserError if none has this name.
std::vector<std::string> builtin_reward_names();
std::unique_ptr<RewardFunction> make_builtin_reward(const std::string& name, const RewardSettings& settings);

// The weighted sum of several rewards, which are computed in parallel. If one fails, the sum fails.
class WeightedReward : public RewardFunction {
 public:
  struct Part {
    std::string name;
    double weight;
    std::unique_ptr<RewardFunction> function;
  };
  WeightedReward(std::vector<Part> parts, std::optional<double> failure_reward);

  std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) override;
  void cancel() override;
  void check(const Dataset& dataset) const override;

 private:
  const std::vector<Part> parts_;
  const std::optional<double> failure_reward_;
};

// Makes the reward of the setting `reward`. On return, processes are started, files imported and endpoints
// reached. For a single entry without a name and with weight 1, RewardResult::rewards is empty. Throws
// UserError if a setting, file or command cannot be used, and IoError if an endpoint cannot be reached.
std::unique_ptr<RewardFunction> make_reward(const RewardEntries& entries, const RewardSettings& settings);
// The same for the text of a command line.
std::unique_ptr<RewardFunction> make_reward(const std::string& text, const RewardSettings& settings);

int64_t count_failures(std::span<const RewardResult> results);

}  // namespace bough

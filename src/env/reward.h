// Rewards: a number for each finished completion.
//
//   reward: ""                        the task's verifier of the final number (verifier.h)
//   reward: NAME                      another built-in verifier (builtin_reward_names)
//   reward: my_reward.py:score        the user's Python function, in worker processes (process_reward.h)
//   reward: http://host:8000/score    an endpoint (http_reward.h)
//   reward:                           several, each with a name and a weight: their weighted sum
//     - {name: right, function: "my_reward.py:score"}
//     - {name: style, command: ./judge --strict, weight: 0.2}       a command that answers lines of JSON
//
// A reward that cannot be had (an exception, a hang, a result that is no finite number) is a failed one. It
// comes with a message, and the run goes on: without the sample, whose group's mean, deviation and loss are
// those of the others; or with `failure_reward` in its place, where that is set. Of several rewards all must
// be had. Callers count failures as `reward/failures`, and end a run whose rewards fail one after the other.
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

// What is scored. Refers to the caller's texts, which must live until the call returns. Not necessarily
// UTF-8: the completion may have been cut inside a character.
struct RewardRequest {
  std::string_view prompt;      // as the model saw it
  std::string_view completion;  // without the stop token
  const Problem* problem;       // never null
};

struct RewardResult {
  double reward = 0;  // finite; of a failed one failure_reward, or 0
  bool failed = false;
  std::string message;  // why it failed; else what the verifier says, or ""
  bool valid = true;    // false: failed, and no reward stands in its place
  // Of named rewards: what each gave, before its weight. Those that failed are missing.
  std::map<std::string, double> rewards;
};

// A reward that could not be had.
RewardResult failed_reward(std::optional<double> failure_reward, std::string message);

// What a sample keeps of its result: `reward` unless it is not valid, `rewards`, `valid`, `reward_failure`.
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
    v("workers", workers, "processes, or connections, that compute a reward side by side", range(1, 1024));
    v("timeout_seconds", timeout_seconds,
      "limit of one call; a call beyond it fails and its worker is restarted", range(0.001, 86400));
    v("retries", retries,
      "further attempts at a call whose worker died, or whose endpoint refused, broke off or answered 5xx",
      range(0, 100));
    v("retry_timeouts", retry_timeouts, "retry also calls that took too long");
    v("startup_timeout_seconds", startup_timeout_seconds,
      "limit of what comes before the first call: importing the user's file, a command's ready line, an "
      "endpoint that accepts connections",
      range(0.1, 86400));
    v("failure_reward", failure_reward,
      "reward of a call that failed; null: its sample is left out, of its group's mean and of the loss");
    v("max_consecutive_failures", max_consecutive_failures,
      "so many failed rewards in a row, and no other between them, end the run", range(1, 1'000'000'000));
    v("python", python, "interpreter; empty: $BOUGH_PYTHON, else .venv of the installation, else python3");
    v("verifier", verifier, "of the final number, where no function is given");
    v("math", math, "of the verifier math");
    v("code", code, "of the verifier code");
  }
};

// One of the rewards of a run: exactly one of function, command, url and verifier is set.
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
    v("name", name, "of its metrics, reward/NAME/...; default: the function's or the verifier's name");
    v("function", function, "FILE.py:FUNCTION");
    v("command", command, "a shell command that answers lines of JSON (docs/add_a_reward.md)");
    v("url", url, "http://HOST:PORT/PATH of an endpoint that answers POSTs of JSON");
    v("verifier", verifier, "one that is built in, by its name");
    v("weight", weight, "its factor in the sum; 0: it is only recorded", range(-1e6, 1e6));
    v("workers", workers, "null: reward_service.workers", range(1, 1024));
    v("timeout_seconds", timeout_seconds, "null: reward_service.timeout_seconds", range(0.001, 86400));
    v("ready_line", ready_line, "the command says when it has loaded, by the line {\"ready\": true}");
  }
  void check() const;

  // A built-in verifier's name, http://..., or FILE.py:FUNCTION.
  static RewardEntry from_text(const std::string& text);
  std::optional<std::string> to_text() const;

  // The name given, or the default one; "" where there is none.
  std::string metric_name() const;
};

// The setting `reward`; empty: the verifier of the final number.
using RewardEntries = std::vector<RewardEntry>;

class RewardFunction {
 public:
  virtual ~RewardFunction() = default;

  // Returns a result for each request, in order. May be called from several threads, whose requests are
  // scored side by side as far as there are workers; every call returns once its own are done. Throws on
  // broken invariants only.
  virtual std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) = 0;

  // From any thread, when nobody wants rewards any more: calls that run or wait return soon, with failures,
  // and so do all later ones.
  virtual void cancel() {}

  RewardResult score(const RewardRequest& request) { return score_all(std::span(&request, 1)).front(); }

  // Throws UserError where this function could never score the data set (a gold that is no number), so that a
  // run ends at its start and not after hours.
  virtual void check(const Dataset& dataset) const {}
};

// The task's verifier: 1 or 0.
class VerifierReward : public RewardFunction {
 public:
  explicit VerifierReward(const RewardSettings& settings = {});
  std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) override;
  void check(const Dataset& dataset) const override;

 private:
  NumberVerifier verifier_;
  std::optional<double> failure_reward_;
};

// Verifiers that are built in. UserError: there is none of this name.
std::vector<std::string> builtin_reward_names();
std::unique_ptr<RewardFunction> make_builtin_reward(const std::string& name, const RewardSettings& settings);

// Several rewards as one: their weighted sum, computed side by side. A sample of which one fails fails.
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

// What the setting `reward` asks for, complete: processes are started, files imported, endpoints reached.
// A single entry without a name and with weight 1 has no parts (RewardResult::rewards is empty). UserError: a
// setting, a file or a command that cannot be used; IoError: an endpoint that cannot be reached.
std::unique_ptr<RewardFunction> make_reward(const RewardEntries& entries, const RewardSettings& settings);
// The setting as a command line has it.
std::unique_ptr<RewardFunction> make_reward(const std::string& text, const RewardSettings& settings);

int64_t count_failures(std::span<const RewardResult> results);

}  // namespace bough

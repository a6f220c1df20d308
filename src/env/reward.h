// Rewards: a number for each finished completion.
//
//   reward: ""                        the task's verifier of the final number (verifier.h)
//   reward: my_reward.py:score        the user's Python function, in worker processes (python_reward.h)
//
// A reward that cannot be had (an exception, a hang, a result that is no finite number) is a failed one. It
// comes with a message, and the run goes on: without the sample, whose group's mean, deviation and loss are
// those of the others; or with `failure_reward` in its place, where that is set. Callers count failures as
// `reward/failures`, and end a run whose rewards fail one after the other.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/settings.h"
#include "data/problems.h"
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
};

// A reward that could not be had.
RewardResult failed_reward(std::optional<double> failure_reward, std::string message);

struct RewardSettings {
  int64_t workers = 2;
  double timeout_seconds = 15;
  double startup_timeout_seconds = 120;
  std::optional<double> failure_reward;
  int64_t max_consecutive_failures = 256;
  std::string python;
  VerifierSettings verifier;

  template <class V>
  void visit(V& v) {
    v("workers", workers, "processes that run the user's reward function", range(1, 1024));
    v("timeout_seconds", timeout_seconds,
      "limit of one call; a call beyond it fails and its worker is restarted", range(0.001, 86400));
    v("startup_timeout_seconds", startup_timeout_seconds, "limit of importing the user's file",
      range(0.1, 86400));
    v("failure_reward", failure_reward,
      "reward of a call that failed; null: its sample is left out, of its group's mean and of the loss");
    v("max_consecutive_failures", max_consecutive_failures,
      "so many failed rewards in a row, and no other between them, end the run", range(1, 1'000'000'000));
    v("python", python, "interpreter; empty: $BOUGH_PYTHON, else .venv of the installation, else python3");
    v("verifier", verifier, "of the final number, where no function is given");
  }
};

class RewardFunction {
 public:
  virtual ~RewardFunction() = default;

  // Returns a result for each request, in order. May be called from several threads. Throws on broken
  // invariants only.
  virtual std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) = 0;

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

// The function that the setting `reward` names: "" or FILE.py:FUNCTION. UserError: neither, or the file
// cannot be loaded; blocks until every worker has imported it.
std::unique_ptr<RewardFunction> make_reward(const std::string& specification, const RewardSettings& settings);

int64_t count_failures(std::span<const RewardResult> results);

}  // namespace bough

// Accuracy on problems that are not trained on.
//
//   avg@k   fraction of right samples, with k samples per problem
//   pass@k  fraction of problems with at least one right sample
//
// A sample is right if its reward is at least kRightReward. The same (seed, problem, sample) has the same
// random numbers at every evaluation, so two evaluations differ only by the weights.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "control/generator.h"
#include "engine/engine.h"
#include "env/reward.h"
#include "report/metrics.h"

namespace bough {

// The verifier gives 1 or 0. A user's function may give part of the reward for form, which does not make a
// sample right.
inline constexpr double kRightReward = 0.5;

struct Interval {
  double low = 0, high = 1;
};

// Returns Wilson's 95% score interval of a proportion (E. B. Wilson, JASA 22, 1927), from `rate` of n >= 1
// independent trials. It lies inside [0, 1], and is sensible at rates 0 and 1 too.
Interval wilson_interval(double rate, int64_t n);

struct EvaluationResult {
  int64_t num_problems = 0;
  int64_t k = 1;
  double avg_at_k = 0;
  double pass_at_k = 0;
  double reward_mean = 0;
  Interval interval;       // of avg_at_k; n is num_problems: samples of one problem are not independent
  double length_mean = 0;  // generated tokens per sample
  double truncated_fraction = 0;
  int64_t failures = 0;  // rewards that failed
  int64_t new_tokens = 0;
  double seconds = 0;
};

// Metrics NAME/avg_at_k and so on, and time/NAME.
MetricValues to_metrics(const EvaluationResult& result, const std::string& name = "eval");
Json to_json(const EvaluationResult& result);
std::string describe(const EvaluationResult& result);  // "34.2% (95%: 30.1 to 38.5) of 512 problems"

struct EvaluationOptions {
  SamplingParameters sampling;  // n_samples is k; temperature 0 is greedy
  uint64_t seed = 0;
  int64_t samples_in_flight = 256;
  CollectOptions collect;
  // Samples are conversations if both are set.
  Environment* environment = nullptr;
  const ConversationFormat* conversations = nullptr;
  bool in_rounds = false;  // as in GeneratorOptions
  // If set, gets all samples with their rewards, in the order of the problems' ends.
  std::function<void(std::vector<Trajectory>)> take_samples;
};

// Returns nullopt if collect.stop() returned true. The data set must not be empty. Leaves the engine idle.
std::optional<EvaluationResult> evaluate(Engine& engine, const Dataset& dataset, const TextCodec& codec,
                                         RewardFunction& reward, const EvaluationOptions& options);

}  // namespace bough

#include "control/evaluation.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "base/clock.h"
#include "base/error.h"
#include "base/random.h"

namespace bough {

Interval wilson_interval(double rate, int64_t n) {
  BOUGH_CHECK(n >= 1 && rate >= 0 && rate <= 1, "rate ", rate, ", n ", n);
  constexpr double z = 1.959963984540054;  // 97.5% of a normal distribution lie below
  const auto trials = static_cast<double>(n);
  const double scale = 1 / (1 + z * z / trials);
  const double center = (rate + z * z / (2 * trials)) * scale;
  const double half = z * std::sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) * scale;
  return {std::max(0.0, center - half), std::min(1.0, center + half)};
}

MetricValues to_metrics(const EvaluationResult& result) {
  return {{"eval/avg_at_k", result.avg_at_k},
          {"eval/avg_at_k_low", result.interval.low},
          {"eval/avg_at_k_high", result.interval.high},
          {"eval/pass_at_k", result.pass_at_k},
          {"eval/reward_mean", result.reward_mean},
          {"eval/length_mean", result.length_mean},
          {"eval/truncated_fraction", result.truncated_fraction},
          {"time/eval", result.seconds}};
}

Json to_json(const EvaluationResult& result) {
  return {{"num_problems", result.num_problems},
          {"k", result.k},
          {"avg_at_k", result.avg_at_k},
          {"pass_at_k", result.pass_at_k},
          {"interval", {result.interval.low, result.interval.high}},
          {"reward_mean", result.reward_mean},
          {"length_mean", result.length_mean},
          {"truncated_fraction", result.truncated_fraction},
          {"reward_failures", result.failures},
          {"new_tokens", result.new_tokens},
          {"seconds", result.seconds}};
}

std::string describe(const EvaluationResult& result) {
  char buffer[128];
  std::snprintf(buffer, sizeof buffer, "%.1f%% (95%%: %.1f to %.1f) of %lld problems", 100 * result.avg_at_k,
                100 * result.interval.low, 100 * result.interval.high,
                static_cast<long long>(result.num_problems));
  return buffer;
}

std::string completion_text(const PromptEncoder& encoder, const GeneratedSample& sample,
                            const std::vector<std::string>& stop_strings) {
  std::span<const int32_t> ids(sample.token_ids);
  if (sample.finish_reason == FinishReason::kStop) ids = ids.first(ids.size() - 1);
  std::string text = encoder.tokenizer().decode(ids);
  if (sample.finish_reason == FinishReason::kStopString) {
    size_t cut = text.size();
    for (const std::string& stop : stop_strings) cut = std::min(cut, text.find(stop));
    text.resize(cut);
  }
  return text;
}

std::optional<EvaluationResult> evaluate(Engine& engine, const Dataset& dataset, const PromptEncoder& encoder,
                                         RewardFunction& reward, const EvaluationOptions& options) {
  BOUGH_CHECK(dataset.size() > 0, "nothing to evaluate on");
  const Clock::Time start = SteadyClock().now();
  // Another stream than training's, whose ids would otherwise draw the same numbers.
  const uint64_t seed = CounterRandom(options.seed, Purpose::evaluation).bits(0, 0);
  std::vector<GenerationRequest> requests;
  std::vector<std::string> prompts;
  for (size_t i = 0; i < dataset.size(); ++i) {
    EncodedPrompt prompt = encoder.encode(dataset[i]);
    requests.push_back(make_request(options.gconfig, i, std::move(prompt.ids), seed));
    prompts.push_back(std::move(prompt.text));
  }
  const auto results = sample_all(engine, std::move(requests), options.sampling);
  if (!results) return std::nullopt;

  EvaluationResult out;
  out.num_problems = static_cast<int64_t>(dataset.size());
  out.k = options.gconfig.n_samples;
  std::vector<std::string> completions;
  for (const GenerationResult& result : *results) {
    for (const GeneratedSample& sample : result.samples) {
      completions.push_back(completion_text(encoder, sample, options.gconfig.stop));
      out.new_tokens += static_cast<int64_t>(sample.token_ids.size());
      out.truncated_fraction += sample.finish_reason == FinishReason::kLength;
    }
  }
  std::vector<RewardRequest> to_score;
  for (size_t i = 0; i < completions.size(); ++i) {
    const size_t problem = i / static_cast<size_t>(out.k);
    to_score.push_back({prompts[problem], completions[i], &dataset[problem]});
  }
  const std::vector<RewardResult> rewards = reward.score_all(to_score);
  out.failures = count_failures(rewards);
  for (size_t first = 0; first < rewards.size(); first += static_cast<size_t>(out.k)) {
    int64_t right = 0;
    for (size_t i = first; i < first + static_cast<size_t>(out.k); ++i) {
      right += rewards[i].reward >= kRightReward;
      out.reward_mean += rewards[i].reward;
    }
    out.avg_at_k += static_cast<double>(right);
    out.pass_at_k += right > 0;
  }
  const auto samples = static_cast<double>(rewards.size());
  out.avg_at_k /= samples;
  out.reward_mean /= samples;
  out.truncated_fraction /= samples;
  out.length_mean = static_cast<double>(out.new_tokens) / samples;
  out.pass_at_k /= static_cast<double>(out.num_problems);
  out.interval = wilson_interval(out.avg_at_k, out.num_problems);
  out.seconds = seconds_since(start);
  return out;
}

}  // namespace bough

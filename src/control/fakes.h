// Fakes for tests of what drives an engine: an engine without a model, text by bytes, a reward without
// workers. No torch. For tests only.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/random.h"
#include "control/generator.h"
#include "data/problems.h"
#include "env/reward.h"
#include "rollout/engine.h"

namespace bough::testing {

// Finishes one request a step, the last submitted first. Each sample is one digit, a function of (seed, id,
// sample), and the byte-level tokenizer's stop token.
class FakeEngine final : public Engine {
 public:
  static constexpr int32_t kStop = 258;

  explicit FakeEngine(FakeClock* clock = nullptr) : clock_(clock) {}

  void submit(GenerationRequest request) override {
    submitted.push_back(request);
    samples_in_flight_ += request.sampling.n_samples;
    most_samples_in_flight = std::max(most_samples_in_flight, samples_in_flight_);
    waiting_.push_back(std::move(request));
  }
  std::vector<GenerationResult> step() override {
    if (clock_) clock_->advance(std::chrono::seconds(1));
    if (waiting_.empty()) return {};
    if (--steps_before_error == 0) throw IoError("the engine broke");
    const GenerationRequest request = std::move(waiting_.back());
    waiting_.pop_back();
    samples_in_flight_ -= request.sampling.n_samples;
    GenerationResult result{request.id, request.prompt_ids, request.sampling.temperature, {}, {}};
    for (int64_t i = 0; i < request.sampling.n_samples; ++i) {
      const auto draw =
          CounterRandom(request.seed, Purpose::test).below(10, request.id, static_cast<uint64_t>(i));
      const auto digit = static_cast<int32_t>('0' + draw);
      GeneratedSample sample{.token_ids = {digit, kStop},
                             .logprobs = {-1.f, -0.5f},
                             .raw_logprobs = {-1.f, -0.5f},
                             .truncated_logprobs = {-1.f, -0.5f},
                             .versions = {version_, version_},
                             .finish_reason = FinishReason::kStop};
      statistics_.new_tokens += 2;
      result.samples.push_back(std::move(sample));
    }
    return {std::move(result)};
  }
  bool idle() const override { return waiting_.empty(); }
  bool cancel(uint64_t id) override {
    return std::erase_if(waiting_, [&](const GenerationRequest& request) { return request.id == id; }) > 0;
  }
  void pause() override {}
  void resume() override {}
  bool paused() const override { return false; }
  void park() override { parked_ = std::exchange(waiting_, {}); }
  void unpark() override { waiting_ = std::exchange(parked_, {}); }
  void update_weights(const WeightUpdate& update) override { version_ = update.version; }
  int32_t version() const override { return version_; }
  EngineStatistics statistics() const override { return statistics_; }

  std::vector<GenerationRequest> submitted;
  int64_t most_samples_in_flight = 0;
  int64_t steps_before_error = -1;

 private:
  FakeClock* clock_;
  std::vector<GenerationRequest> waiting_, parked_;
  int64_t samples_in_flight_ = 0;
  int32_t version_ = 0;
  EngineStatistics statistics_;
};

// Right (1) where the completion is an even digit; "9" fails.
class FakeReward final : public RewardFunction {
 public:
  std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) override {
    std::vector<RewardResult> results;
    for (const RewardRequest& request : requests) {
      if (request.completion == "9") results.push_back({0, true, "nine is out of order"});
      else results.push_back({(request.completion.back() - '0') % 2 == 0 ? 1.0 : 0.0, false, ""});
    }
    return results;
  }
};

// A byte is a token.
class ByteCodec final : public TextCodec {
 public:
  EncodedPrompt encode(const Problem& problem) const override {
    if (problem.prompt.empty()) throw UserError("an empty prompt");
    return {problem.prompt, {problem.prompt.begin(), problem.prompt.end()}};
  }
  std::string decode(std::span<const int32_t> ids) const override { return {ids.begin(), ids.end()}; }
};

inline Dataset numbered_problems(int64_t n) {
  std::vector<Problem> problems;
  for (int64_t i = 0; i < n; ++i)
    problems.push_back({.id = str("p", i), .prompt = str("Q", i, " "), .messages = {}, .answer = str(i)});
  return {std::move(problems), "numbered"};
}

}  // namespace bough::testing

// Fakes for tests of code that drives an engine: an engine without a model, a codec by bytes, a reward
// without workers. No torch. For tests only.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/mutex.h"
#include "base/random.h"
#include "control/generator.h"
#include "control/prompt_encoder.h"
#include "control/worker_parts.h"
#include "data/problems.h"
#include "engine/engine.h"
#include "env/reward.h"
#include "text/tokenizer.h"

namespace bough::testing {

// Base of fake engines. Functions that a fake does not override do nothing.
class BareEngine : public Engine {
 public:
  bool cancel(uint64_t) override { return false; }
  void pause() override {}
  void resume() override {}
  bool paused() const override { return false; }
  void park() override {}
  void unpark() override {}
  void update_weights(const WeightUpdate&) override {}
  int32_t version() const override { return 0; }
  EngineStatistics statistics() const override { return {}; }
};

// Finishes one request per step, the last submitted first. Each sample is one digit, a function of (seed, id,
// sample), and the byte-level tokenizer's stop token.
class FakeEngine final : public BareEngine {
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
                             .sampling_logprobs = {-1.f, -0.5f},
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

// The reward is 1 if the completion ends with an even digit, else 0. Scoring "9" fails.
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

// Each byte is one token.
class ByteCodec final : public TextCodec {
 public:
  EncodedPrompt encode(const Problem& problem) const override {
    if (problem.prompt.empty()) throw UserError("an empty prompt");
    return {problem.prompt, {problem.prompt.begin(), problem.prompt.end()}};
  }
  std::string decode(std::span<const int32_t> ids) const override { return {ids.begin(), ids.end()}; }
};

// Renders by a chat template. Subclasses have the tokens.
class TemplateChat : public ChatCodec {
 public:
  explicit TemplateChat(ChatTemplate chat_template = {}) : template_(std::move(chat_template)) {}
  std::string render(const Conversation& conversation) const override {
    return template_.render(conversation);
  }
  std::string tool_call_parser() const override { return template_.tool_call_parser(); }

 private:
  ChatTemplate template_;
};

// ChatML. Each byte of text is one token, and the byte-level tokenizer's special tokens are used.
class ByteChat final : public TemplateChat {
 public:
  std::vector<int32_t> encode_chat(std::string_view text, bool) const override {
    std::vector<int32_t> ids;
    while (!text.empty()) {
      const bool is_start = text.starts_with(kStart), is_end = text.starts_with(kEnd);
      ids.push_back(is_start ? 257 : is_end ? 258 : static_cast<unsigned char>(text[0]));
      text.remove_prefix(is_start ? kStart.size() : is_end ? kEnd.size() : 1);
    }
    return ids;
  }
  std::string text_of(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (id >= 257) text += id == 257 ? kStart : kEnd;
      else text += static_cast<char>(id);
    }
    return text;
  }

 private:
  static constexpr std::string_view kStart = "<|im_start|>", kEnd = "<|im_end|>";
};

// An episode has `turns_of(problem)` turns, each with reward 1. A thread of this object posts each answer
// after `delay_of(episode, turn)`. If the delay is nullopt, the episode fails.
class FakeEnvironment final : public Environment {
 public:
  using Delay = std::optional<std::chrono::microseconds>;
  std::function<int64_t(const Problem&)> turns_of = [](const Problem&) { return 2; };
  std::function<Delay(uint64_t episode, int64_t turn)> delay_of = [](uint64_t, int64_t) {
    return std::chrono::microseconds(0);
  };

  int64_t most_open = std::numeric_limits<int64_t>::max(), highest_open = 0;
  int64_t max_open() const override { return most_open; }

  FakeEnvironment() : thread_([this] { run(); }) {}
  ~FakeEnvironment() override {
    {
      const MutexLock lock(mutex_);
      is_ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  uint64_t begin(const Problem& problem, uint64_t, std::shared_ptr<ReplyQueue> reply_queue) override {
    const MutexLock lock(mutex_);
    const uint64_t episode = next_++;
    episodes_[episode] = {std::move(reply_queue), turns_of(problem), 0};
    highest_open = std::max(highest_open, static_cast<int64_t>(episodes_.size()));
    answer(episode);
    return episode;
  }
  void step(uint64_t episode, const Action& action) override {
    const MutexLock lock(mutex_);
    ++episodes_.at(episode).turn;
    answer(episode);
  }
  void end(uint64_t episode) override {
    const MutexLock lock(mutex_);
    episodes_.erase(episode);
  }
  size_t num_open() {
    const MutexLock lock(mutex_);
    return episodes_.size();
  }

 private:
  using SystemClock = std::chrono::steady_clock;
  struct Open {
    std::shared_ptr<ReplyQueue> reply_queue;
    int64_t turns = 0, turn = 0;
  };
  void answer(uint64_t episode) REQUIRES(mutex_) {
    const Open& open = episodes_.at(episode);
    EpisodeReply reply{.episode = episode};
    reply.observation.messages.push_back({{"role", "user"}, {"content", str("say ", open.turn)}});
    if (open.turn > 0) reply.observation.reward = 1;
    reply.observation.done = open.turn == open.turns;
    const Delay delay = delay_of(episode, open.turn);
    if (!delay) {
      reply.failure = EpisodeFailure::kCrash;
      reply.message = "it died";
    }
    due_.emplace(SystemClock::now() + delay.value_or(std::chrono::microseconds(0)),
                 std::pair(open.reply_queue, std::move(reply)));
    changed_.notify_all();
  }
  void run() {
    MutexLock lock(mutex_);
    while (!is_ending_) {
      if (due_.empty()) {
        changed_.wait(mutex_);
      } else if (const auto next = due_.begin()->first; next > SystemClock::now()) {
        changed_.wait_until(mutex_, next);
      } else {
        due_.begin()->second.first->post(due_.begin()->second.second);
        due_.erase(due_.begin());
      }
    }
  }

  Mutex mutex_;
  CondVar changed_;
  std::map<uint64_t, Open> episodes_ GUARDED_BY(mutex_);
  std::multimap<SystemClock::time_point, std::pair<std::shared_ptr<ReplyQueue>, EpisodeReply>> due_
      GUARDED_BY(mutex_);
  uint64_t next_ GUARDED_BY(mutex_) = 0;
  bool is_ending_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// A policy of functions; one that is not set decides like ControllerPolicy.
struct FakePolicy final : ControllerPolicy {
  bool evaluation_due(int64_t step, bool is_last) override { return evaluates && evaluates(step, is_last); }
  bool checkpoint_due(int64_t step) override { return saves && saves(step); }
  std::optional<std::string> why_refused(const ScoredGroup& group) override {
    return refuses ? refuses(*group.group) : std::nullopt;
  }

  std::function<bool(int64_t step, bool is_last)> evaluates;
  std::function<bool(int64_t step)> saves;
  std::function<std::optional<std::string>(const FinishedGroup&)> refuses;
};

// The problems in their order, over and over.
class RepeatedProblems final : public TaskList {
 public:
  explicit RepeatedProblems(const Dataset& problems) : problems_(problems) {}
  GroupTask task(uint64_t id) override {
    const Problem& problem = problems_[id % problems_.size()];
    return {.id = id, .name = problem.id, .problem = &problem};
  }

 private:
  const Dataset& problems_;
};

// Keeps the last state that was written.
struct FakeCheckpoints final : CheckpointWriter {
  void take_snapshot() override { ++num_snapshots; }
  void write(const ControllerState& state, bool) override {
    saved = state;
    if (on_write) on_write(state);
  }
  std::string why_not_at(int64_t) const override { return why_not; }

  int64_t num_snapshots = 0;
  std::string why_not;
  std::optional<ControllerState> saved;
  std::function<void(const ControllerState&)> on_write;
};

inline Dataset numbered_problems(int64_t n) {
  std::vector<Problem> problems;
  for (int64_t i = 0; i < n; ++i)
    problems.push_back({.id = str("p", i), .prompt = str("Q", i, " "), .messages = {}, .answer = str(i)});
  return {std::move(problems), "numbered"};
}

inline PromptEncoder byte_level_encoder() {
  return PromptEncoder(Tokenizer::from_json(byte_level_tokenizer_json(), "tokenizer.json"), ChatTemplate());
}

}  // namespace bough::testing

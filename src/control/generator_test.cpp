#include "control/generator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "control/fakes.h"

namespace bough {
namespace {

using testing::ByteCodec;
using testing::FakeEngine;
using testing::FakeReward;

// `n` plain prompts.
class Prompts final : public TaskSource {
 public:
  explicit Prompts(int64_t n) : n_(n) {}
  std::optional<GroupTask> next() override {
    if (next_ == n_) return std::nullopt;
    const int64_t i = next_++;
    return GroupTask{.id = static_cast<uint64_t>(i), .name = str("g", i), .prompt_ids = {1, 2}};
  }

 private:
  int64_t n_, next_ = 0;
};

GeneratorOptions samples_of(int64_t n_samples, int64_t in_flight = 256) {
  GeneratorOptions options{.seed = 3, .samples_in_flight = in_flight};
  options.sampling.n_samples = n_samples;
  return options;
}

TEST(Generator, GroupsStandInTheOrderOfTheTasks) {
  FakeEngine engine;  // finishes the last submitted request first
  Prompts prompts(9);
  Generator generator({engine}, prompts, samples_of(2));
  const auto groups = generator.collect(9, {});
  ASSERT_TRUE(groups);
  ASSERT_EQ(groups->size(), 9u);
  for (uint64_t i = 0; i < 9; ++i) {
    EXPECT_EQ((*groups)[i].id, i);
    ASSERT_EQ((*groups)[i].samples.size(), 2u);
    EXPECT_EQ((*groups)[i].samples[0].group, str("g", i));
    EXPECT_FALSE((*groups)[i].samples[0].prompt) << "a plain prompt has no texts";
  }
  EXPECT_TRUE(generator.idle());
}

TEST(Generator, KeepsABoundedNumberInFlight) {
  FakeEngine engine;
  Prompts prompts(20);
  Generator generator({engine}, prompts, samples_of(4, 10));
  std::vector<int64_t> progress;
  CollectOptions options;
  options.on_progress = [&](int64_t done, int64_t total) {
    EXPECT_EQ(total, 20);
    progress.push_back(done);
  };
  ASSERT_TRUE(generator.collect(20, options));
  EXPECT_EQ(engine.most_samples_in_flight, 12);  // a group begins while fewer than 10 are in flight
  ASSERT_EQ(progress.size(), 20u);
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(progress[static_cast<size_t>(i)], i + 1);
}

TEST(Generator, AStopLeavesTheEngineIdle) {
  FakeEngine engine;
  Prompts prompts(9);
  Generator generator({engine}, prompts, samples_of(2));
  CollectOptions options;
  int polls = 0;
  options.stop = [&] { return ++polls == 3; };
  EXPECT_FALSE(generator.collect(5, options));
  EXPECT_TRUE(engine.idle());
  EXPECT_TRUE(generator.idle());
}

TEST(Generator, AnErrorOfTheEngineLeavesItIdle) {
  FakeEngine engine;
  engine.steps_before_error = 3;
  Prompts prompts(9);
  Generator generator({engine}, prompts, samples_of(2));
  EXPECT_THROW(generator.collect(9, {}), IoError);
  EXPECT_TRUE(engine.idle());
}

TEST(Generator, APromptThatCannotBeEncodedStartsNoRequest) {
  FakeEngine engine;
  const ByteCodec codec;
  const Dataset problems({{.id = "empty", .prompt = "", .messages = {}, .answer = ""}}, "empty");
  DatasetTasks tasks(problems);
  Generator generator({engine, &codec}, tasks, samples_of(2));
  EXPECT_THROW(generator.step(), UserError);
  EXPECT_TRUE(generator.idle());
}

TEST(Generator, EachCompletionGetsItsOwnReward) {
  FakeEngine engine;
  FakeReward reward;
  const ByteCodec codec;
  const Dataset problems = testing::numbered_problems(9);
  DatasetTasks tasks(problems);
  Generator generator({engine, &codec}, tasks, samples_of(3));
  auto groups = generator.collect(9, {}).value();
  const std::vector<RewardResult> rewards = score(groups, reward);
  ASSERT_EQ(rewards.size(), 27u);
  int64_t num_failed = 0;
  for (size_t i = 0; i < rewards.size(); ++i) {
    Trajectory& sample = groups[i / 3].samples[i % 3];
    EXPECT_FALSE(sample.reward);
    set_reward(sample, rewards[i]);
    const int digit = sample.completion->back() - '0';
    EXPECT_EQ(sample.reward, digit != 9 && digit % 2 == 0 ? 1.0 : 0.0);
    EXPECT_EQ(sample.reward_failure.has_value(), digit == 9);
    EXPECT_EQ(*sample.prompt, str("Q", *sample.answer, " "));
    num_failed += digit == 9;
  }
  EXPECT_GT(num_failed, 0) << "the seed must draw a nine";
  EXPECT_THROW(generator.collect(1, {}), InternalError) << "nothing runs and nothing may begin";
}

// Conversations with a fake environment on problems 0 to 8, with 1 to 3 turns.
struct Conversations {
  explicit Conversations(GeneratorOptions generation = samples_of(3))
      : generator({engine, nullptr, &environment, &format}, tasks, std::move(generation)) {
    environment.turns_of = [](const Problem& problem) { return 1 + std::stoll(problem.answer) % 3; };
  }
  // Returns the groups in order. The state is checked after each step.
  std::vector<FinishedGroup> collect() {
    CollectOptions options;
    options.on_step = [this] { generator.check_integrity(); };
    return generator.collect(9, options).value();
  }

  const Dataset problems = testing::numbered_problems(9);
  DatasetTasks tasks{problems};
  FakeEngine engine;
  testing::FakeEnvironment environment;
  const testing::ByteChat chat;
  const ConversationFormat format{chat, {}, 4096};
  Generator generator;
};

TEST(Generator, ConversationsOfAGroupEndTogether) {
  Conversations run;
  const std::vector<FinishedGroup> groups = run.collect();
  for (const FinishedGroup& group : groups) {
    const auto turns = static_cast<int64_t>(1 + group.id % 3);
    ASSERT_EQ(group.samples.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      const Trajectory& row = group.samples[i];
      EXPECT_EQ(row.trajectory, str(i));
      EXPECT_EQ(row.num_generated(), 2 * turns);
      EXPECT_EQ(row.reward, static_cast<double>(turns));
      EXPECT_EQ(row.turn_rewards, std::vector<double>(static_cast<size_t>(turns), 1));
      std::string expected;
      for (int64_t t = 0; t < turns; ++t)
        expected += str("<|im_start|>user\nsay ", t, "<|im_end|>\n<|im_start|>assistant\n#<|im_end|>",
                        t + 1 < turns ? "\n" : "");
      std::string text = run.chat.text_of(row.input_ids);
      for (size_t k = 0; k < row.input_ids.size(); ++k)
        if (row.loss_mask[k] && row.input_ids[k] < 256) {
          const size_t at = run.chat.text_of(std::span(row.input_ids).first(k)).size();
          text[at] = '#';
        }
      EXPECT_EQ(text, expected);
    }
  }
  EXPECT_EQ(run.environment.num_open(), 0u);
  FakeReward reward;
  const std::vector<RewardResult> rewards = score(groups, reward);
  ASSERT_EQ(rewards.size(), 27u);
  EXPECT_EQ(rewards[7].reward, 3) << "the environment's, of problem 2";
}

// Under sparse attention the engine computes these tokens as it did when it sampled them.
TEST(Generator, RequestsOfLaterTurnsMarkTheTokensThatWereSampled) {
  Conversations run;
  run.collect();
  int64_t later = 0;
  for (const GenerationRequest& request : run.engine.submitted) {
    ASSERT_EQ(request.sampled.size(), request.prompt_ids.size());
    int64_t turns = 0;
    for (size_t i = 0; i < request.sampled.size(); ++i) {
      // A sampled turn is a digit after a line break, and the stop token.
      const bool is_digit = i > 0 && request.prompt_ids[i - 1] == '\n' && request.prompt_ids[i] >= '0' &&
                            request.prompt_ids[i] <= '9';
      const bool is_stop = i > 0 && request.sampled[i - 1] != 0 && request.prompt_ids[i] == FakeEngine::kStop;
      EXPECT_EQ(request.sampled[i] != 0, is_digit || is_stop) << i;
      turns += is_digit;
    }
    later += turns > 0;
  }
  EXPECT_EQ(later, 3 * (0 + 1 + 2) * 3) << "three groups each of one, two and three turns, of three samples";
}

TEST(Generator, ConversationsWaitForRoomInTheEnvironment) {
  for (const bool in_rounds : {true, false}) {
    GeneratorOptions options = samples_of(3);
    options.in_rounds = in_rounds;
    Conversations run(options);
    run.environment.most_open = 2;  // fewer than a group has
    for (const FinishedGroup& group : run.collect()) EXPECT_EQ(group.samples.size(), 3u);
    EXPECT_EQ(run.environment.highest_open, 2);
  }
}

TEST(Generator, AFailedConversationLeavesTheOthers) {
  Conversations run;
  run.environment.delay_of = [](uint64_t episode, int64_t turn) -> testing::FakeEnvironment::Delay {
    if (episode % 5 == 0 && turn == static_cast<int64_t>(episode % 2)) return std::nullopt;
    return std::chrono::microseconds(0);
  };
  const std::vector<FinishedGroup> groups = run.collect();
  int64_t num_failed = 0;
  for (const FinishedGroup& group : groups)
    for (const Trajectory& row : group.samples) {
      num_failed += !row.valid;
      EXPECT_EQ(row.valid, row.reward.has_value());
      if (!row.valid) EXPECT_EQ(row.fields["conversation"]["reason"], "environment_crash");
      else EXPECT_EQ(row.fields["conversation"]["reason"], "done");
    }
  EXPECT_EQ(num_failed, 6);
  EXPECT_EQ(run.environment.num_open(), 0u);
  FakeReward reward;
  EXPECT_EQ(count_failures(score(groups, reward)), 6);
}

TEST(Generator, AStopEndsConversations) {
  Conversations run;
  run.environment.delay_of = [](uint64_t, int64_t turn) { return std::chrono::microseconds(turn * 1000); };
  CollectOptions options;
  int polls = 0;
  options.stop = [&] { return ++polls == 8; };
  EXPECT_FALSE(run.generator.collect(9, options));
  EXPECT_TRUE(run.engine.idle());
  EXPECT_TRUE(run.generator.idle());
  EXPECT_EQ(run.environment.num_open(), 0u);
  run.generator.check_integrity();
}

TEST(Generator, TheMostLikelyResponseIsTheLastOfItsGroup) {
  GeneratorOptions options = samples_of(3, 10);
  options.with_baseline = true;
  FakeEngine engine;
  Prompts prompts(9);
  Generator plain({engine}, prompts, options);
  CollectOptions checks;
  checks.on_step = [&] { plain.check_integrity(); };
  std::vector<FinishedGroup> all = plain.collect(9, checks).value();
  EXPECT_EQ(engine.most_samples_in_flight, 12);  // three groups of four
  Conversations conversations(options);
  for (FinishedGroup& group : conversations.collect()) all.push_back(std::move(group));
  EXPECT_EQ(all.size(), 18u);
  for (const FinishedGroup& group : all) {
    ASSERT_EQ(group.samples.size(), 4u);
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(group.samples[i].baseline, i == 3);
      EXPECT_EQ(group.samples[i].trained, i < 3);
      EXPECT_EQ(group.samples[i].in_loss(), i < 3);
    }
  }
  int64_t num_greedy = 0;
  for (const GenerationRequest& request : engine.submitted) {
    num_greedy += request.sampling.greedy;
    EXPECT_EQ(request.sampling.n_samples, request.sampling.greedy ? 1 : 3);
  }
  EXPECT_EQ(num_greedy, 9);
  std::set<uint64_t> ids;
  for (const GenerationRequest& request : conversations.engine.submitted) {
    ids.insert(request.id);
    EXPECT_EQ(request.sampling.greedy, request.id % 4 == 3);
  }
  EXPECT_EQ(ids.size(), 36u) << "a number a conversation";
}

TEST(Generator, AStopEndsWhatIsLeftOfAGroup) {
  GeneratorOptions options = samples_of(3);
  options.with_baseline = true;
  FakeEngine engine;
  Prompts prompts(2);
  Generator generator({engine}, prompts, options);
  EXPECT_TRUE(generator.step().empty()) << "one of the group's two requests goes on";
  generator.abandon();
  EXPECT_TRUE(engine.idle());
  generator.check_integrity();
}

// The requests that the engine gets, in order.
std::vector<std::string> requests_of(uint64_t shuffle, bool in_rounds) {
  GeneratorOptions options = samples_of(3);
  options.in_rounds = in_rounds;
  Conversations run(options);
  run.environment.delay_of = [shuffle](uint64_t episode, int64_t turn) {
    const auto draw = CounterRandom(shuffle, Purpose::test).below(3000, episode, static_cast<uint64_t>(turn));
    return std::chrono::microseconds(draw);
  };
  run.collect();
  std::vector<std::string> out;
  for (const GenerationRequest& request : run.engine.submitted)
    out.push_back(str(request.id, " ", request.seed, " ", run.chat.text_of(request.prompt_ids)));
  return out;
}

TEST(Generator, InRoundsTheOrderOfAnswersDoesNotMatter) {
  EXPECT_EQ(requests_of(1, true), requests_of(2, true));
  auto first = requests_of(1, false), second = requests_of(2, false);
  EXPECT_NE(first, second) << "else the test says nothing";
  std::sort(first.begin(), first.end());
  std::sort(second.begin(), second.end());
  EXPECT_EQ(first, second) << "what is drawn does not depend on it in any case";
}

// Tools that take 10 to 200 ms on a fake clock, for conversations of `turns` turns.
class TimedTools final : public Environment {
 public:
  TimedTools(FakeClock& clock, int64_t turns) : clock_(clock), turns_(turns) {}

  uint64_t begin(const Problem&, uint64_t, std::shared_ptr<ReplyQueue> reply_queue) override {
    reply_queue_ = std::move(reply_queue);
    turns_done_.push_back(0);
    answer(turns_done_.size() - 1);
    return turns_done_.size() - 1;
  }
  void step(uint64_t episode, const Action&) override {
    ++turns_done_[episode];
    answer(episode);
  }
  void end(uint64_t) override {}

  void post_due() {
    for (; !due_.empty() && due_.begin()->first <= clock_.now(); due_.erase(due_.begin()))
      reply_queue_->post(due_.begin()->second);
  }
  void sleep_until_next() {
    if (!due_.empty()) clock_.sleep_until(due_.begin()->first);
    post_due();
  }

 private:
  void answer(uint64_t episode) {
    const int64_t turn = turns_done_[episode];
    const auto sampled = CounterRandom(1, Purpose::test).below(190'000, episode, static_cast<uint64_t>(turn));
    EpisodeReply reply{.episode = episode};
    reply.observation.messages.push_back({{"role", "user"}, {"content", str("say ", turn)}});
    reply.observation.done = turn == turns_;
    due_.emplace(clock_.now() + std::chrono::microseconds(turn == 0 ? 0 : 10'000 + sampled),
                 std::move(reply));
  }

  FakeClock& clock_;
  const int64_t turns_;
  std::shared_ptr<ReplyQueue> reply_queue_;
  std::vector<int64_t> turns_done_;  // by episode
  std::multimap<Clock::Time, EpisodeReply> due_;
};

// A pass takes one millisecond of the fake clock and generates one token for each of at most 64 samples. A
// turn has 20 tokens.
class BatchEngine final : public testing::BareEngine {
 public:
  BatchEngine(FakeClock& clock, TimedTools& tools) : clock_(clock), tools_(tools) {}

  void submit(GenerationRequest request) override { running_.push_back({std::move(request), 20}); }
  std::vector<GenerationResult> step() override {
    std::vector<GenerationResult> out;
    if (running_.empty()) return out;
    clock_.advance(kPass);
    tools_.post_due();
    ++num_passes;
    for (size_t i = 0; i < std::min<size_t>(64, running_.size()); ++i) --running_[i].second;
    std::erase_if(running_, [&](const auto& entry) {
      const auto& [request, left] = entry;
      if (left > 0) return false;
      GeneratedSample sample{.token_ids = std::vector<int32_t>(19, 'x'),
                             .finish_reason = FinishReason::kStop};
      sample.token_ids.push_back(FakeEngine::kStop);
      sample.logprobs.assign(20, -1);
      sample.versions.assign(20, 0);
      out.push_back({request.id, request.prompt_ids, 1.0, {std::move(sample)}, {}});
      return true;
    });
    return out;
  }
  // The generator calls this before it waits for tools. The clock then advances to the next answer.
  bool idle() const override {
    if (running_.empty()) tools_.sleep_until_next();
    return running_.empty();
  }

  static constexpr std::chrono::milliseconds kPass{1};
  int64_t num_passes = 0;

 private:
  FakeClock& clock_;
  TimedTools& tools_;
  std::vector<std::pair<GenerationRequest, int64_t>> running_;
};

// 504 conversations of 4 turns need at least 504 * 4 * 20 / 64 = 630 passes. Tools run one after the other
// would alone take 504 * 4 * 105 ms = 212 s.
TEST(Generator, TheEngineWorksWhileToolsSleep) {
  FakeClock clock;
  TimedTools tools(clock, 4);
  BatchEngine engine(clock, tools);
  const testing::ByteChat chat;
  const ConversationFormat format(chat, {}, 4096);
  const Dataset problems = testing::numbered_problems(126);
  DatasetTasks tasks(problems);
  Generator generator({engine, nullptr, &tools, &format}, tasks, samples_of(4, 1000));
  const Clock::Time begin = clock.now();
  ASSERT_TRUE(generator.collect(126, {}));
  EXPECT_GE(engine.num_passes, 630);
  const double busy = engine.num_passes * seconds_between({}, Clock::Time(BatchEngine::kPass));
  EXPECT_GT(busy / seconds_between(begin, clock.now()), 0.8) << engine.num_passes << " passes";
}

TEST(CompletionText, EndsBeforeStopTokensAndStopStrings) {
  const ByteCodec codec;
  EXPECT_EQ(completion_text(codec, {.token_ids = {'4', '2', 258}, .finish_reason = FinishReason::kStop}, {}),
            "42");
  EXPECT_EQ(completion_text(codec, {.token_ids = {'4', '2'}, .finish_reason = FinishReason::kLength}, {"2"}),
            "42");
  EXPECT_EQ(
      completion_text(codec, {.token_ids = {'4', '\n', 'Q', ':'}, .finish_reason = FinishReason::kStopString},
                      {"Q:", "\n"}),
      "4");
}

}  // namespace
}  // namespace bough

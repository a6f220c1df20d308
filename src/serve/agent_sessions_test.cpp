// Leases under the run's own controller and a fake clock. Whatever clients do, the staleness limit holds,
// every begun group is trained on or dropped for a counted reason, and no session of a leased group is
// refused. Conversation rows have the exact sampled tokens, and each of these is trained on once.
#include "serve/agent_sessions.h"

#include <gtest/gtest.h>

#include <set>

#include "base/log.h"
#include "base/random.h"
#include "control/controller.h"
#include "control/fakes.h"
#include "serve/api.h"

namespace bough {
namespace {

using testing::ByteChat;

constexpr int32_t kStop = 258;

GenerationResult say(const std::string& text, bool stops = true) {
  GenerationResult result{.temperature = 0.5};
  GeneratedSample& sample = result.samples.emplace_back();
  sample.token_ids.assign(text.begin(), text.end());
  if (stops) sample.token_ids.push_back(kStop);
  sample.logprobs.assign(sample.token_ids.size(), -0.5);
  sample.raw_logprobs = sample.sampling_logprobs = sample.logprobs;
  sample.versions.assign(sample.token_ids.size(), 7);
  sample.finish_reason = stops ? FinishReason::kStop : FinishReason::kLength;
  return result;
}

struct Outcomes final : ExternalRolloutSink {
  void finished(FinishedGroup group) override { groups.push_back(std::move(group)); }
  void failed(uint64_t id, const std::string& reason) override { failures.emplace_back(id, reason); }
  void wake() override {}

  std::vector<FinishedGroup> groups;
  std::vector<std::pair<uint64_t, std::string>> failures;
};

struct Sessions {
  explicit Sessions(AgentSessionsOptions options = {.group_size = 2, .min_group = 2, .lease_seconds = 100})
      : format(chat, {}, 4096), agent_sessions(format, options) {
    agent_sessions.start(outcomes);
  }
  void offer(uint64_t id) { agent_sessions.offer({.id = id, .name = str("p", id), .problem = &problem}); }
  AgentSessions::Started start(const std::string& task = "", const std::string& key = "",
                               const std::string& once = "") {
    return agent_sessions.start_session(task, key, once, clock.now());
  }
  int status_of(const std::function<void()>& call) const {
    try {
      call();
    } catch (const ApiError& error) {
      return error.status;
    }
    return 200;
  }
  // One turn of a conversation: the template shows `messages`, and the model answers.
  void talk(AgentSession& session, OrderedJson messages, const std::string& answer,
            const std::string& id) const {
    const std::string text = format.render(messages, {}, true);
    session.take(*session.ask(text, {}, messages, {}), say(answer), {}, {}, id);
    session.check_integrity();
  }

  FakeClock clock;
  ByteChat chat;
  ConversationFormat format;
  Problem problem{.id = "p", .prompt = "Q", .messages = {}, .answer = "A"};
  Outcomes outcomes;
  AgentSessions agent_sessions;
};

OrderedJson user(const std::string& text) {
  return OrderedJson::array({message_of("user", text)});
}

TEST(AgentSessions, AGroupIsLeasedToWhoeverComesAndGoesBackWhenItsSessionsHaveEnded) {
  Sessions run;
  EXPECT_EQ(run.status_of([&] { run.start(); }), 429) << "nothing is offered";
  run.offer(4);
  const auto first = run.start(), second = run.start();
  EXPECT_EQ(first.problem["prompt"], "Q");
  EXPECT_EQ(first.problem["answer"], "A");
  EXPECT_EQ(first.sessions_left, 1);
  EXPECT_EQ(second.session->group(), 4u) << "an admitted group's sessions are not refused";
  EXPECT_EQ(run.status_of([&] { run.start(); }), 429) << "it has all its sessions";
  for (const auto& each : {first, second}) {
    run.talk(*each.session, user("hi"), "yo", "a1");
    EXPECT_FALSE(each.session->set_reward("a2", 1, {}));
    EXPECT_TRUE(each.session->set_reward(std::nullopt, 3, {{"form", 1}}));
    EXPECT_TRUE(each.session->set_reward("a1", 2, {{"form", 0.5}}));
    run.agent_sessions.check_integrity();
    run.agent_sessions.end_session(each.key);
    EXPECT_EQ(run.status_of([&] { run.agent_sessions.end_session(each.key); }), 410);
    EXPECT_EQ(run.status_of([&] { run.agent_sessions.find(each.key); }), 410);
  }
  run.agent_sessions.check_integrity();
  ASSERT_EQ(run.outcomes.groups.size(), 1u);
  EXPECT_EQ(run.outcomes.groups[0].id, 4u);
  ASSERT_EQ(run.outcomes.groups[0].samples.size(), 2u);
  const Trajectory& row = run.outcomes.groups[0].samples[1];
  EXPECT_EQ(row.group, "p4");
  EXPECT_EQ(row.trajectory, "1");
  EXPECT_EQ(row.reward, 2);
  EXPECT_EQ(row.rewards, (std::map<std::string, double>{{"form", 0.5}}));
  EXPECT_EQ(row.turn_rewards, (std::vector<double>{2}));
  EXPECT_EQ(row.temperature, 0.5);
  EXPECT_EQ(row.answer, "A");
  EXPECT_TRUE(is_conversation(row));
  EXPECT_EQ(last_turn(row), "yo");
  EXPECT_EQ(run.agent_sessions.counts().refused, 2);
}

TEST(AgentSessions, ATaskOfTheAgentsIsAGroupOfItsOwn) {
  Sessions run;
  for (const uint64_t id : {1, 2, 3}) run.offer(id);
  const auto mine = run.start("mine"), other = run.start("other"), any = run.start();
  EXPECT_EQ(run.start("mine").session->group(), mine.session->group());
  EXPECT_EQ(mine.session->id(), "mine-1-0");
  EXPECT_NE(other.session->group(), mine.session->group());
  EXPECT_NE(any.session->group(), other.session->group());
  EXPECT_EQ(run.status_of([&] { run.start("mine"); }), 429)
      << "a group of the same task again is another one";
  EXPECT_EQ(run.start("other").session->group(), other.session->group());
}

TEST(AgentSessions, AtItsDeadlineAGroupClosesWithWhatItHasOrIsDropped) {
  Sessions run({.group_size = 4, .min_group = 2, .lease_seconds = 10});
  run.offer(1);
  run.offer(2);
  const auto end = [&](const AgentSessions::Started& started, bool has_reward = true) {
    run.talk(*started.session, user("hi"), "yo", "a");
    if (has_reward) started.session->set_reward(std::nullopt, 1, {});
    run.agent_sessions.end_session(started.key);
  };
  for (int i = 0; i < 2; ++i) end(run.start("full"));
  const auto late = run.start("full");
  run.talk(*late.session, user("hi"), "well", "a");
  end(run.start("poor"));
  end(run.start("poor"), false);
  run.clock.advance(std::chrono::seconds(9));
  EXPECT_FALSE(run.agent_sessions.expire(run.clock.now()));
  EXPECT_TRUE(run.agent_sessions.is_open(*late.session));
  run.clock.advance(std::chrono::seconds(1));
  EXPECT_TRUE(run.agent_sessions.expire(run.clock.now()));
  run.agent_sessions.check_integrity();
  EXPECT_FALSE(run.agent_sessions.is_open(*late.session));
  EXPECT_EQ(run.status_of([&] { run.agent_sessions.find(late.key); }), 410);
  ASSERT_EQ(run.outcomes.groups.size(), 1u);
  ASSERT_EQ(run.outcomes.groups[0].samples.size(), 3u);
  EXPECT_FALSE(run.outcomes.groups[0].samples[2].valid);
  EXPECT_EQ(run.outcomes.groups[0].samples[2].reward_failure, "lease expired");
  EXPECT_EQ(run.outcomes.failures, (std::vector<std::pair<uint64_t, std::string>>{{2, "lease expired"}}));
  EXPECT_EQ(run.agent_sessions.counts().without_reward, 1);
}

TEST(AgentSessions, AKeyMayGoOnAndAStartSentAgainIsTheSameSession) {
  Sessions run;
  run.offer(1);
  const auto first = run.start("", "", "once");
  EXPECT_EQ(run.start("", "", "once").key, first.key);
  const auto second = run.start("", first.key);
  EXPECT_EQ(second.key, first.key);
  EXPECT_NE(second.session, first.session);
  EXPECT_EQ(run.agent_sessions.find(first.key), second.session);
  EXPECT_FALSE(run.agent_sessions.is_open(*first.session)) << "what the key named before has ended";
  EXPECT_EQ(run.status_of([&] { run.start("", "sk-sess-guess"); }), 400);
  EXPECT_EQ(run.status_of([&] { run.start("", "me"); }), 400);
  run.agent_sessions.close();
  EXPECT_EQ(run.status_of([&] { run.start(); }), 410);
  EXPECT_TRUE(run.outcomes.groups.empty() && run.outcomes.failures.empty());
}

// ---- Rows.

std::vector<Trajectory> rows_of(const AgentSession& session) {
  return session.trajectory("g", true, "done", true);
}
int64_t num_trained(const Trajectory& row) {
  return row.num_generated();
}

TEST(AgentSession, ARowGrowsByTheTokensThatWereSampled) {
  Sessions run;
  AgentSession session(run.format, "s", 0, "0");
  OrderedJson messages = user("hi");
  run.talk(session, messages, " yo ", "a1");  // the client may have trimmed the text
  messages.push_back(message_of("assistant", "yo"));
  messages.push_back(message_of("user", "more"));
  run.talk(session, messages, "no", "a2");
  const auto rows = rows_of(session);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(run.chat.text_of(rows[0].input_ids),
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n yo <|im_end|>\n"
            "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nno<|im_end|>");
  EXPECT_EQ(num_trained(rows[0]), 8);
  EXPECT_EQ(rows[0].fields["conversation"]["shown_otherwise"], 1);
  EXPECT_EQ(rows[0].fields["conversation"]["retokenized"].size(), 1u);
  for (size_t i = 0; i < rows[0].input_ids.size(); ++i)
    EXPECT_EQ(rows[0].versions[i], rows[0].loss_mask[i] ? 7 : -1);
}

TEST(AgentSession, HistoriesThatDifferForkAndTrainEachTokenOnce) {
  Sessions run;
  AgentSession session(run.format, "s", 0, "0");
  OrderedJson messages = user("hi");
  run.talk(session, messages, "one", "a1");
  run.talk(session, messages, "two", "a2");  // the same request gets another sample
  OrderedJson first = messages, rewritten = messages;
  first.push_back(message_of("assistant", "one"));
  first.push_back(message_of("user", "go"));
  rewritten.push_back(message_of("assistant", "three"));
  rewritten.push_back(message_of("user", "go"));
  run.talk(session, first, "on", "a3");
  run.talk(session, rewritten, "off", "a4");
  run.talk(session, first, "again", "a5");
  const auto rows = rows_of(session);
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(num_trained(rows[0]), 4 + 3) << "one, on";
  EXPECT_EQ(num_trained(rows[1]), 4);
  EXPECT_EQ(num_trained(rows[2]), 4) << "the history that nobody sampled is not trained";
  EXPECT_EQ(num_trained(rows[3]), 6) << "from where the first row was, its tokens in the prompt";
  EXPECT_TRUE(std::equal(rows[3].input_ids.begin(), rows[3].input_ids.end() - 6, rows[0].input_ids.begin()));
  EXPECT_EQ(rows[0].turn_rewards.size(), 5u);
  EXPECT_EQ(rows[3].turn, 4);
}

TEST(AgentSession, RequestsAtOnceThatGoOnFromOnePlaceAreTwoRows) {
  Sessions run;
  AgentSession session(run.format, "s", 0, "0");
  OrderedJson messages = user("hi");
  run.talk(session, messages, "one", "a1");
  messages.push_back(message_of("assistant", "one"));
  messages.push_back(message_of("user", "go"));
  const std::string text = run.format.render(messages, {}, true);
  const auto left = session.ask(text, {}, messages, {}), right = session.ask(text, {}, messages, {});
  EXPECT_EQ(left->row.ids, right->row.ids);
  session.take(*right, say("r"), {}, {}, "a2");
  session.take(*left, say("l"), {}, {}, "a3");
  session.check_integrity();
  EXPECT_EQ(rows_of(session).size(), 2u);
}

TEST(AgentSession, AForcedBeginningIsNotTrainedAndTheRowGrowsFromIt) {
  EnvironmentSettings settings;
  settings.tool_call_parser = "hermes";
  const ByteChat chat;
  const ConversationFormat format(chat, settings, 4096, false);
  AgentSession session(format, "s", 0, "0");
  const std::string text = format.render(user("hi"), {}, true), forced = "<tool_call>";
  const std::string call = R"({"name": "f", "arguments": {}}</tool_call>)";
  session.take(*session.ask(text, {.forced = forced}, user("hi"), {}), say(call), {}, {}, "a1");
  const OrderedJson& said = rows_of(session).at(0).fields.at("conversation").at("messages");
  EXPECT_NE(said.dump().find("tool_calls"), std::string::npos) << said.dump();
  const auto next =
      session.ask(text + forced + call + chat.text_of(std::vector{kStop}) + "and?", {}, user("hi"), {});
  EXPECT_EQ(next->kept, 2u) << "what is shown again is the row";
  session.take(*next, say("x"), {}, {}, "a2");
  session.check_integrity();
  const std::vector<Trajectory> rows = rows_of(session);
  ASSERT_EQ(rows.size(), 1u);
  const auto& mask = rows[0].loss_mask;
  const auto prompt = static_cast<std::ptrdiff_t>(chat.encode_chat(text + forced, false).size());
  EXPECT_EQ(std::count(mask.begin(), mask.begin() + prompt, 1), 0);
  EXPECT_EQ(std::count(mask.begin(), mask.end(), 1), static_cast<std::ptrdiff_t>(call.size()) + 3);
}

TEST(AgentSession, APromptOfTokenIdsContinuesTheRowThatItBeginsWith) {
  Sessions run;
  AgentSession session(run.format, "s", 0, "0");
  session.take(*session.ask({65, 66}), say("x"), {}, {}, "a1");
  const auto longer = session.ask({65, 66, 'x', kStop, 67});
  EXPECT_EQ(longer->kept, 2u);
  session.take(*longer, say("y"), {}, {}, "a2");
  const auto other = session.ask({65, 68});
  EXPECT_EQ(other->kept, 0u) << "a part of a text is nobody's";
  session.take(*other, say("z", false), {}, {}, "a3");
  session.check_integrity();
  EXPECT_EQ(rows_of(session).size(), 2u);
}

TEST(AgentSession, ARequestSentAgainIsTheSameInteraction) {
  Sessions run;
  AgentSession session(run.format, "s", 0, "0");
  const RequestIdentity sent{.fingerprint = 5}, again{.fingerprint = 5, .is_retry = true},
      other{.fingerprint = 6, .is_retry = true}, keyed{.fingerprint = 5, .idempotency_key = "k"};
  session.take(*session.ask({65}), say("x"), {}, sent, "a1");
  EXPECT_FALSE(session.answered(sent)) << "equal requests are separate samples";
  EXPECT_FALSE(session.answered(other));
  EXPECT_FALSE(session.answered(keyed));
  ASSERT_TRUE(session.answered(again));
  session.take_again(again, "a2");
  session.take(*session.ask({65}), say("y"), {}, keyed, "a3");
  EXPECT_TRUE(session.answered(keyed));
  EXPECT_EQ(session.num_interactions(), 2);
  EXPECT_TRUE(session.set_reward("a2", 4, {}));
  EXPECT_EQ(rows_of(session)[0].turn_rewards, (std::vector<double>{4, 0}));
}

// ---- Under the controller.

// A fake of the controller's workers. `run_` takes the groups in place of the engine. The other calls are
// recorded, and the test decides when they are done.
class SessionWorkers final : public Workers {
 public:
  explicit SessionWorkers(Sessions& run) : run_(run) {}
  void begin(uint64_t id, std::vector<PartialRollout>) override {
    EXPECT_TRUE(begun.insert(id).second);
    run_.offer(id);
  }
  void take_weights() override { wants_weights = true; }
  void evaluate(Clock::Time) override {}
  void cancel_evaluation() override {}
  void save_running() override { wants_running = true; }
  void score(GroupPointer group) override { scoring.push_back(std::move(group)); }
  void publish(int64_t version) override { published = version; }
  void train(TrainOrder order) override { orders.push_back(std::move(order)); }
  void take_snapshot() override {}
  void write_checkpoint(ControllerState, bool) override { writes = true; }
  EngineStatistics engine_statistics() const override { return {}; }
  double engine_idle_seconds() const override { return 0; }
  Clock::Time last_progress() const override { return {}; }
  std::string busy_with() const override { return ""; }
  std::string waits_for_external() const override { return run_.agent_sessions.waits_for(); }

  std::set<uint64_t> begun;
  std::vector<GroupPointer> scoring;
  std::vector<TrainOrder> orders;
  int64_t published = -1;
  bool wants_weights = false, wants_running = false, writes = false;

 private:
  Sessions& run_;
};

TEST(AgentSessions, ARunThatWaitsForAgentsHasNotStalled) {
  set_log_level(LogLevel::kSilent);
  Sessions run({.group_size = 1, .min_group = 1, .lease_seconds = 1000});
  SessionWorkers workers(run);
  ControllerPolicy policy;
  ControllerObserver observer;
  Controller controller(workers, run.clock, {.total_steps = 1, .stall_seconds = 50}, policy, observer);
  controller.start();
  controller.on(WeightsTaken{0, 0});
  run.clock.advance(std::chrono::seconds(60));
  controller.on(TimePassed{});
  EXPECT_EQ(controller.activity(), "rollout 0/1, waiting for agents: 1 group free");
  const auto started = run.start();
  EXPECT_EQ(controller.activity(), "rollout 0/1, waiting for agents: 1 group begun, 0/1 sessions ended");
  run.talk(*started.session, user("hi"), "yo", "a");
  started.session->set_reward(std::nullopt, 1, {});
  run.agent_sessions.end_session(started.key);
  controller.on(GroupGenerated{std::make_shared<const FinishedGroup>(run.outcomes.groups.at(0))});
  run.clock.advance(std::chrono::seconds(60));
  EXPECT_THROW(controller.on(TimePassed{}), StallError) << "the reward is not the agents' to give";
  set_log_level(LogLevel::kInfo);
}

TEST(AgentSessions, AdversarialClientsNeverPassTheStalenessLimiter) {
  set_log_level(LogLevel::kSilent);
  const CounterRandom random(23, Purpose::test);
  int64_t num_expired = 0, num_refused = 0, num_failed = 0;
  for (uint64_t schedule = 0; schedule < 200 && !::testing::Test::HasFailure(); ++schedule) {
    uint64_t what = 0;
    const auto below = [&](int64_t n) {
      return static_cast<int64_t>(random.below(static_cast<uint64_t>(n), schedule, what++));
    };
    const int64_t group_size = 1 + below(3), batch = 1 + below(3), eta = below(3), steps = 1 + below(4);
    Sessions run({.group_size = group_size, .min_group = 1 + below(group_size), .lease_seconds = 20});
    SessionWorkers workers(run);
    ControllerPolicy policy;
    ControllerObserver observer;
    Controller controller(workers, run.clock,
                          {.batch_groups = batch,
                           .max_staleness = eta,
                           .total_steps = steps,
                           .group_size = group_size,
                           .min_group = 1},
                          policy, observer);
    SCOPED_TRACE(
        str("schedule ", schedule, ": groups of ", group_size, ", batches of ", batch, ", eta ", eta));
    int64_t version = -1, num_trained = 0;
    std::set<uint64_t> trained;
    std::vector<std::string> keys;  // also of ended sessions
    const auto check = [&] {
      for (FinishedGroup& group : std::exchange(run.outcomes.groups, {}))
        controller.on(GroupGenerated{std::make_shared<const FinishedGroup>(std::move(group))});
      for (const auto& [id, reason] : std::exchange(run.outcomes.failures, {}))
        controller.on(GroupFailed{id, reason});
      controller.check_integrity();
      run.agent_sessions.check_integrity();
      const Controller::Counts counts = controller.counts();
      const AgentSessions::Counts agent_sessions = run.agent_sessions.counts();
      EXPECT_EQ(counts.running, agent_sessions.waiting + agent_sessions.leased);
      EXPECT_EQ(static_cast<int64_t>(workers.begun.size()), counts.sampled);
      const int64_t live = counts.buffered + counts.awaiting + counts.running + counts.training + num_trained;
      EXPECT_LE(live, std::min(version + eta + 1, steps) * batch) << "more than the staleness limiter admits";
    };
    const auto work = [&] {  // one event of the run's own threads
      if (workers.wants_weights && below(2) == 0) {
        workers.wants_weights = false;
        controller.on(WeightsTaken{version = workers.published, 0});
      } else if (!workers.scoring.empty() && below(2) == 0) {
        const GroupPointer group = workers.scoring.back();
        workers.scoring.pop_back();
        controller.on(GroupScored{group->id, {}, {}});
      } else if (!workers.orders.empty()) {
        const TrainOrder order = std::move(workers.orders.back());
        workers.orders.pop_back();
        for (const ScoredGroup& scored : order.groups) EXPECT_TRUE(trained.insert(scored.group->id).second);
        num_trained += static_cast<int64_t>(order.groups.size());
        workers.published = order.step;
        TrainingDone done;
        done.record.step = order.step;
        controller.on(std::move(done));
      }
      if (std::exchange(workers.wants_running, false)) controller.on(RunningSaved{});
      if (std::exchange(workers.writes, false)) controller.on(CheckpointWritten{});
      controller.on(TimePassed{});
    };
    controller.start();
    const auto quietly = [](const std::function<void()>& call) {
      try {
        call();
      } catch (const ApiError&) {
      }
    };
    const char* tasks[] = {"", "a", "b"};
    for (int i = 0; i < 20000 && !controller.is_finished(); ++i) {
      const bool is_friendly = i > 400;  // in the end clients let the run finish
      switch (is_friendly ? below(3) + 2 : below(8)) {
        case 0: run.clock.advance(std::chrono::seconds(below(8))); break;
        case 1: run.agent_sessions.expire(run.clock.now()); break;
        case 2: work(); break;
        case 3:
          quietly([&] {
            keys.push_back(run.start(is_friendly ? "" : tasks[below(3)],
                                     !keys.empty() && below(9) == 0
                                         ? keys[static_cast<size_t>(below(std::ssize(keys)))]
                                         : "")
                               .key);
          });
          break;
        case 4:
        case 5:
          if (keys.empty()) break;
          quietly([&] {
            const int64_t among = is_friendly ? std::min<int64_t>(8, std::ssize(keys)) : std::ssize(keys);
            const std::string key = keys[keys.size() - 1 - static_cast<size_t>(below(among))];
            const SessionPointer session = run.agent_sessions.find(key);
            if (is_friendly || below(3) > 0) run.talk(*session, user("hi"), "yo", "a");
            if (is_friendly || below(3) > 0) session->set_reward(std::nullopt, 1, {});
            if (is_friendly || below(2) == 0) run.agent_sessions.end_session(key);
          });
          break;
        case 6: quietly([&] { run.agent_sessions.end_session(str("sk-sess-", below(5))); }); break;
        case 7: quietly([&] { run.agent_sessions.find("nobody's"); }); break;
      }
      if (is_friendly && i % 50 == 0) {
        run.clock.advance(std::chrono::seconds(25));
        run.agent_sessions.expire(run.clock.now());
      }
      check();
    }
    EXPECT_TRUE(controller.is_finished()) << controller.activity();
    EXPECT_EQ(static_cast<int64_t>(trained.size()), steps * batch);
    const AgentSessions::Counts agent_sessions = run.agent_sessions.counts();
    num_expired += agent_sessions.expired;
    num_refused += agent_sessions.refused;
    for (const auto& [reason, count] : agent_sessions.failed) {
      num_failed += count;
      EXPECT_EQ(controller.dropped_by_reason().at(reason), count);
    }
  }
  EXPECT_GT(num_expired, 200);
  EXPECT_GT(num_refused, 1000);
  EXPECT_GT(num_failed, 200);
  set_log_level(LogLevel::kInfo);
}

}  // namespace
}  // namespace bough

#include "env/environment.h"

#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "env/calculator.h"
#include "env/guess.h"

namespace bough {
namespace {

Problem problem_of(const Json& record) {
  return {"p", record.at("question"), {}, record.at("answer"), record};
}

Action calling(const std::string& text) {
  return {.text = "", .content = "", .calls = {{"c1", "calc", OrderedJson::parse(text)}}};
}
Action saying(const std::string& text) {
  return {.text = text, .content = text};
}

TEST(Calculator, ComputesAndJudgesTheAnswer) {
  const auto episode = make_calculator();
  const Observation opening = episode->reset({"p", "7+5-3", {}, "9", {{"question", "7+5-3"}}}, 1);
  EXPECT_EQ(opening.messages[1]["content"], "7+5-3");
  EXPECT_EQ(opening.tools[0]["function"]["name"], "calc");
  Observation reply = episode->step(calling(R"({"a": 7, "op": "+", "b": 5})"));
  EXPECT_EQ(reply.messages.dump(), R"([{"role":"tool","content":"12"}])");
  EXPECT_FALSE(reply.done || reply.reward);
  for (const char* bad :
       {R"({"a": 7, "op": "/", "b": 5})", R"({"a": "7", "op": "+", "b": 5})", R"({"a": 7, "op": "+"})",
        R"({"a": 1e300, "op": "*", "b": 5})", R"({"a": 18446744073709551615, "op": "*", "b": 5})"}) {
    reply = episode->step(calling(bad));
    EXPECT_EQ(reply.invalid_calls, 1) << bad;
    EXPECT_FALSE(reply.done);
  }
  EXPECT_EQ(episode->step(calling(R"({"a": -3, "op": "*", "b": 5})")).messages[0]["content"], "-15");
  reply = episode->step(saying("It is 9."));
  EXPECT_TRUE(reply.done);
  EXPECT_EQ(reply.reward, 1);
  EXPECT_EQ(episode->step(saying("It is 8.")).reward, 0);
}

TEST(Calculator, DemonstrationsLeadToTheAnswerUnlessTheySlip) {
  for (const double slips : {0.0, 1.0}) {
    const CalculatorSettings settings{.min_steps = 1, .max_steps = 3, .slips = slips};
    const auto problems = make_calculator_problems(20, Split::train, 3, settings);
    const auto traces = make_calculator_traces(20, Split::train, 3, settings);
    int64_t right = 0;
    for (const Json& trace : traces) {
      const Json& last = trace.at("messages").back();
      if (last["content"].get<std::string>().find("tool_call") != std::string::npos) continue;
      for (const Json& problem : problems)
        right +=
            problem["question"] == trace["messages"][1]["content"] && problem["answer"] == last["content"];
    }
    if (slips == 0) EXPECT_EQ(right, 20);
    else EXPECT_LT(right, 10);
  }
}

TEST(Tasks, SplitsAreDisjointAndListsGrow) {
  const auto questions = [](const std::vector<Json>& problems) {
    std::set<std::string> out;
    for (const Json& problem : problems) out.insert(problem.dump());
    return out;
  };
  const auto check = [&](const auto& make) {
    const auto train = make(100, Split::train, 1), test = make(60, Split::test, 2);
    EXPECT_EQ(questions(train).size(), 100u);
    for (const std::string& question : questions(test)) EXPECT_FALSE(questions(train).contains(question));
    const auto shorter = make(10, Split::train, 1);
    EXPECT_TRUE(std::equal(shorter.begin(), shorter.end(), train.begin()));
  };
  check([](int64_t n, Split split, uint64_t seed) { return make_calculator_problems(n, split, seed, {}); });
  check([](int64_t n, Split split, uint64_t seed) { return make_guess_problems(n, split, seed, {}); });
  EXPECT_THROW(make_guess_problems(100, Split::train, 1, {.max_low = 1, .width = 4}), UserError);
  EXPECT_THROW(make_calculator_problems(100, Split::train, 1, {.max_operand = 1, .max_steps = 2}), UserError);
}

TEST(Guess, AnswersUntilItIsFoundOrOver) {
  const Json record = make_guess_problems(1, Split::train, 1, {.guesses = 3})[0];
  const int64_t secret = std::stoll(record.at("answer").get<std::string>());
  const auto episode = make_guess();
  EXPECT_EQ(episode->reset(problem_of(record), 1).messages[0]["content"], record["question"]);
  Observation reply = episode->step(saying(str(secret - 1)));
  EXPECT_EQ(reply.messages[0]["content"], "higher");
  EXPECT_EQ(reply.reward, 0);
  EXPECT_FALSE(reply.done);
  EXPECT_EQ(episode->step(saying("hm")).messages[0]["content"], "say a number");
  reply = episode->step(saying(str("maybe ", secret)));
  EXPECT_EQ(reply.reward, 1);
  EXPECT_TRUE(reply.done);
  episode->reset(problem_of(record), 1);
  for (int i = 0; i < 3; ++i) reply = episode->step(saying(str(secret + 1)));
  EXPECT_TRUE(reply.done);
  EXPECT_EQ(reply.reward, 0);
  EXPECT_THROW(episode->reset({"p", "", {}, "4", {}}, 1), UserError);
}

TEST(Guess, DemonstrationsGuessInTheRemainingRange) {
  for (const Json& trace : make_guess_traces(50, Split::train, 1, {})) {
    const Json& messages = trace.at("messages");
    int64_t low = 0, high = 1'000'000;
    for (size_t i = 1; i < messages.size(); i += 2) {
      const int64_t guess = std::stoll(messages[i]["content"].get<std::string>());
      EXPECT_TRUE(guess >= low && guess <= high) << messages.dump();
      if (i + 1 == messages.size()) break;
      if (messages[i + 1]["content"] == "higher") low = guess + 1;
      else high = guess - 1;
    }
  }
}

TEST(ThreadedEnvironment, RepliesToTheCallerAndReportsExceptions) {
  const auto environment = make_environment({.type = "guess"});
  const auto reply_queue = std::make_shared<ReplyQueue>();
  const Problem good = problem_of(make_guess_problems(1, Split::train, 1, {})[0]);
  const Problem bad{"p", "", {}, "4", {}};
  const uint64_t first = environment->begin(good, 1, reply_queue),
                 second = environment->begin(bad, 1, reply_queue);
  std::vector<EpisodeReply> replies;
  while (replies.size() < 2)
    for (EpisodeReply& reply : reply_queue->take(std::chrono::seconds(10)))
      replies.push_back(std::move(reply));
  for (const EpisodeReply& reply : replies) {
    EXPECT_EQ(reply.failure, reply.episode == first ? EpisodeFailure::kNone : EpisodeFailure::kError);
    EXPECT_EQ(reply.message.empty(), reply.episode == first);
  }
  environment->end(second);
  environment->end(first);
  EXPECT_TRUE(reply_queue->take(std::chrono::milliseconds(1)).empty());
}

TEST(EnvironmentSettings, NamesWhatIsMissing) {
  EXPECT_THROW(make_environment({.type = "python"}), UserError);
  EXPECT_THROW(make_environment({.type = "command"}), UserError);
  EXPECT_THROW(make_environment({.type = "guess", .path = "x.py:Y"}), UserError);
}

}  // namespace
}  // namespace bough

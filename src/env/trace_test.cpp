#include "env/trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "base/error.h"
#include "env/verifier.h"

namespace bough {
namespace {

using Registers = std::map<char, int>;

Registers registers_of(const std::string& text) {
  Registers registers;
  for (size_t i = 0; i + 1 < text.size(); i += 2) registers[text[i]] = text[i + 1] - '0';
  return registers;
}

// By the question's text alone: what follows the number of a step is TARGET SIGN OPERAND.
void follow(Registers& registers, const std::string& step) {
  const std::string text = step.substr(step.find_first_of("abcdefghijklmnop"));
  const int by = isdigit(text[2]) ? text[2] - '0' : registers.at(text[2]);
  registers[text[0]] = (registers.at(text[0]) + (text[1] == '-' ? 10 - by : by)) % 10;
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

std::string number_of(const Registers& registers) {
  std::string text;
  for (const auto& [name, digit] : registers) text += std::to_string(digit);
  return text;
}

// Lines of the answer that do not follow from the line before them.
int64_t count_slips(const Json& problem) {
  const auto question = words_of(problem.at("question")), answer = words_of(problem.at("answer"));
  EXPECT_EQ(answer.size(), 2 * (question.size() - 1) + 2);
  Registers registers = registers_of(question[0]);
  int64_t slips = 0;
  for (size_t i = 1; i < question.size(); ++i) {
    EXPECT_EQ(answer[2 * i - 2], question[i]);
    follow(registers, question[i]);
    const Registers written = registers_of(answer[2 * i - 1]);
    slips += written != registers;
    registers = written;
  }
  EXPECT_EQ(answer[answer.size() - 2], "####");
  EXPECT_EQ(answer.back(), number_of(registers));
  return slips;
}

TraceSettings small() {
  TraceSettings settings;
  settings.registers = 3;
  settings.min_steps = 4;
  settings.max_steps = 12;
  return settings;
}

TEST(Trace, AnswersFollowFromTheQuestion) {
  TraceSettings anywhere = small();
  anywhere.max_first = 200;
  for (const TraceSettings& settings : {TraceSettings(), small(), anywhere})
    for (const Json& problem : make_trace_problems(50, Split::train, 3, settings)) {
      EXPECT_EQ(count_slips(problem), 0) << problem;
      const auto question = words_of(problem.at("question"));
      Registers registers = registers_of(question[0]);
      for (size_t i = 1; i < question.size(); ++i) follow(registers, question[i]);
      const NumberVerifier verifier;
      const ExactNumber gold = verifier.gold(std::string(problem.at("answer")), "test");
      EXPECT_EQ(verifier.verify("#### " + number_of(registers), gold).score, 1);
    }
}

TEST(Trace, ResponsesAreAsLongAsTheSettingsSay) {
  std::set<size_t> lengths;
  for (const Json& problem : make_trace_problems(60, Split::train, 1, {}))
    lengths.insert(std::string(problem.at("answer")).size());
  EXPECT_GE(*lengths.begin(), 1024u);
  EXPECT_LE(*lengths.rbegin(), 2048u);
  EXPECT_GT(lengths.size(), 10u);
}

// Steps are numbered from a first number that max_first bounds, with as many digits as the largest can have.
TEST(Trace, NumbersBeginWhereTheSettingsSay) {
  TraceSettings settings = small();
  settings.max_first = 90;
  int64_t least = 1000, largest = 0;
  for (const Json& problem : make_trace_problems(300, Split::train, 4, settings)) {
    const auto words = words_of(problem.at("question"));
    const int64_t first = std::stoll(words[1].substr(0, 3));
    for (size_t i = 1; i < words.size(); ++i)
      ASSERT_EQ(std::stoll(words[i].substr(0, 3)), first + static_cast<int64_t>(i) - 1) << problem;
    least = std::min(least, first);
    largest = std::max(largest, first);
  }
  EXPECT_LT(least, 5);
  EXPECT_GT(largest, 85);
  EXPECT_LE(largest, 90);
}

// One slip, carried on, ends in another number: the answer needs every step.
TEST(Trace, AnyOneSlipChangesTheNumber) {
  TraceSettings slipping = small();
  slipping.slips = 0.1;
  const auto right = make_trace_problems(400, Split::train, 5, small());
  const auto wrong = make_trace_problems(400, Split::train, 5, slipping);
  int64_t with_one = 0;
  for (size_t i = 0; i < right.size(); ++i) {
    EXPECT_EQ(right[i].at("question"), wrong[i].at("question"));
    const int64_t slips = count_slips(wrong[i]);
    if (slips == 0) {
      EXPECT_EQ(right[i], wrong[i]);
    }
    if (slips != 1) continue;
    ++with_one;
    EXPECT_NE(words_of(right[i].at("answer")).back(), words_of(wrong[i].at("answer")).back()) << wrong[i];
  }
  EXPECT_GT(with_one, 50);
}

TEST(Trace, SplitsAreDisjointAndListsBeginAlike) {
  TraceSettings tiny;
  tiny.registers = 2;
  tiny.min_steps = tiny.max_steps = 2;
  std::set<std::string> train, test;
  for (const Json& problem : make_trace_problems(500, Split::train, 1, tiny))
    train.insert(problem.at("question"));
  for (const Json& problem : make_trace_problems(200, Split::test, 2, tiny))
    test.insert(problem.at("question"));
  EXPECT_EQ(train.size(), 500u);
  for (const std::string& question : test) EXPECT_FALSE(train.contains(question)) << question;
  const auto few = make_trace_problems(5, Split::train, 1, small());
  const auto more = make_trace_problems(9, Split::train, 1, small());
  for (size_t i = 0; i < few.size(); ++i) EXPECT_EQ(few[i], more[i]);
}

TEST(Trace, RefusesWhatIsNotThere) {
  TraceSettings tiny;
  tiny.registers = 2;
  tiny.min_steps = tiny.max_steps = 1;
  EXPECT_THROW(make_trace_problems(10'000, Split::train, 1, tiny), UserError);
  tiny.min_steps = 3;
  EXPECT_THROW(make_trace_problems(1, Split::train, 1, tiny), UserError);
}

}  // namespace
}  // namespace bough

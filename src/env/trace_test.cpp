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

// Uses the question's text alone: after its label a step is TARGET SIGN OPERAND.
void follow(Registers& registers, const std::string& step) {
  const std::string text = step.substr(1);
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

// Number of lines in the answer that do not follow from the previous line.
int64_t count_slips(const Json& problem) {
  const auto question = words_of(problem.at("question")), answer = words_of(problem.at("answer"));
  EXPECT_EQ(answer.size(), 3 * (question.size() - 1) + 2);
  Registers registers = registers_of(question[0]);
  int64_t slips = 0;
  for (size_t i = 1; i < question.size(); ++i) {
    const std::string &step = question[i], &sum = answer[3 * i - 2];
    EXPECT_EQ(answer[3 * i - 3], step);
    const auto digit = [](int value) { return std::to_string(value); };
    const std::string by = isdigit(step[3]) ? step.substr(3) : digit(registers.at(step[3]));
    EXPECT_EQ(sum.substr(0, 4), digit(registers.at(step[1])) + step[2] + by + "=");
    follow(registers, step);
    const Registers written = registers_of(answer[3 * i - 1]);
    EXPECT_EQ(sum.substr(4), digit(written.at(step[1])));
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
  anywhere.max_first = 40;
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
  EXPECT_GE(*lengths.begin(), 1000u);
  EXPECT_LE(*lengths.rbegin(), 1340u);
  EXPECT_GT(lengths.size(), 10u);
}

// Labels are consecutive, each occurs once in a question, and max_first bounds the first one.
TEST(Trace, LabelsBeginWhereTheSettingsSay) {
  TraceSettings whole;
  whole.min_steps = whole.max_steps = kTraceLabels;
  const auto all = words_of(make_trace_problems(1, Split::train, 4, whole)[0].at("question"));
  std::string labels;
  for (size_t i = 1; i < all.size(); ++i) labels += all[i][0];
  EXPECT_EQ(std::set<char>(labels.begin(), labels.end()).size(), static_cast<size_t>(kTraceLabels));
  EXPECT_EQ(labels.find_first_of("0123456789abcdefghijklmnop +-=#\n"), std::string::npos);
  TraceSettings settings = small();
  settings.max_first = 40;
  size_t least = 1000, largest = 0;
  for (const Json& problem : make_trace_problems(300, Split::train, 4, settings)) {
    const auto words = words_of(problem.at("question"));
    const size_t first = labels.find(words[1][0]);
    for (size_t i = 1; i < words.size(); ++i) ASSERT_EQ(words[i][0], labels[first + i - 1]) << problem;
    least = std::min(least, first);
    largest = std::max(largest, first);
  }
  EXPECT_LT(least, 3u);
  EXPECT_GT(largest, 36u);
  EXPECT_LT(largest, 40u);
}

// Later lines use the result of a wrong line, so a single wrong line always changes the final number.
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

TEST(Trace, RefusesImpossibleSettings) {
  TraceSettings tiny;
  tiny.registers = 2;
  tiny.min_steps = tiny.max_steps = 1;
  EXPECT_THROW(make_trace_problems(10'000, Split::train, 1, tiny), UserError);
  tiny.min_steps = 3;
  EXPECT_THROW(make_trace_problems(1, Split::train, 1, tiny), UserError);
  TraceSettings many;
  many.max_first = 2;
  EXPECT_THROW(make_trace_problems(1, Split::train, 1, many), UserError);
}

}  // namespace
}  // namespace bough

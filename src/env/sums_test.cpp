#include "env/sums.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <set>

#include "base/error.h"
#include "base/file.h"
#include "base/settings.h"
#include "data/dataset.h"
#include "env/verifier.h"

namespace bough {
namespace {

// Computes the answer from the question alone: its numbers and words.
int64_t solve(const std::string& question) {
  std::vector<std::pair<std::string, int64_t>> numbers;  // text before a number, the number
  size_t begin = 0;
  for (size_t i = 0; i < question.size(); ++i) {
    if (!isdigit(question[i])) continue;
    size_t end = i;
    while (isdigit(question[end])) ++end;
    numbers.push_back({question.substr(begin, i - begin), std::stoll(question.substr(i, end - i))});
    begin = i = end;
  }
  const auto has = [](const std::string& text, std::initializer_list<const char*> words) {
    for (const char* word : words)
      if (text.find(word) != std::string::npos) return true;
    return false;
  };
  int64_t value = numbers[0].second;
  for (size_t i = 1; i < numbers.size(); ++i) {
    const auto& [words, number] = numbers[i];
    if (i == 1 && has(words, {"bags of", "packs of", "boxes hold", "on each of", " for "})) value *= number;
    else if (has(words, {"loses", "drops", "takes", "sells", "gives"})) value -= number;
    else value += number;
  }
  return value;
}

SumsSettings hard() {
  SumsSettings settings;
  settings.max_operand = 50;
  settings.max_steps = 3;
  settings.operations = {"add", "subtract", "multiply"};
  return settings;
}

TEST(Sums, AnswersAreRightAndWorkedOut) {
  for (const SumsSettings& settings : {SumsSettings(), hard()}) {
    for (const SumsProblem& problem : make_sums(2000, Split::train, 7, settings)) {
      const NumberVerifier verifier;
      const ExactNumber gold = verifier.gold(problem.answer, "test");
      EXPECT_EQ(verifier.verify(std::to_string(solve(problem.question)), gold).score, 1) << problem.question;
      // The last step of the worked solution ends in the final number.
      const std::string work = problem.answer.substr(0, problem.answer.find(" #### "));
      EXPECT_EQ(verifier.verify(work, gold).score, 1) << problem.answer;
    }
  }
}

TEST(Sums, SplitsAreDisjoint) {
  std::set<std::string> questions, skeletons;
  for (const auto& problem : make_sums(50'000, Split::train, 1, {})) {
    questions.insert(problem.question);
    skeletons.insert(problem.skeleton);
  }
  EXPECT_EQ(questions.size(), 50'000u);
  for (uint64_t seed : {1, 2}) {
    std::set<std::string> test;
    for (const auto& problem : make_sums(5'000, Split::test, seed, {})) {
      EXPECT_FALSE(questions.contains(problem.question)) << problem.question;
      EXPECT_FALSE(skeletons.contains(problem.skeleton)) << problem.skeleton;
      test.insert(problem.question);
    }
    EXPECT_EQ(test.size(), 5'000u);
  }
  for (const auto& problem : make_sums(100, Split::example, 1, {})) {
    EXPECT_FALSE(skeletons.contains(problem.skeleton)) << problem.skeleton;
  }
}

TEST(Sums, OrderOfOperandsIsNoWayAroundTheSplit) {
  for (const auto& problem : make_sums(3000, Split::train, 1, hard())) {
    if (problem.answer.find(' ') != problem.answer.find(" ####")) continue;  // only questions of one step
    const auto plus = problem.skeleton.find_first_of("+*");
    if (plus == std::string::npos) continue;
    const auto colon = problem.skeleton.find(':');
    EXPECT_LE(std::stoi(problem.skeleton.substr(colon + 1)), std::stoi(problem.skeleton.substr(plus + 1)));
  }
}

TEST(Sums, IsAFunctionOfTheSeed) {
  const auto questions = [](int64_t n, uint64_t seed) {
    std::vector<std::string> list;
    for (const auto& problem : make_sums(n, Split::train, seed, {})) list.push_back(problem.question);
    return list;
  };
  auto longer = questions(300, 5);
  EXPECT_NE(longer, questions(300, 6));
  longer.resize(200);
  EXPECT_EQ(longer, questions(200, 5));
}

TEST(Sums, EasyQuestionsAreShort) {
  size_t total = 0;
  const auto problems = make_sums(5000, Split::train, 1, {});
  for (const auto& problem : problems) {
    EXPECT_LE(problem.question.size(), 60u) << problem.question;
    EXPECT_LE(problem.answer.size(), 16u) << problem.answer;
    total += problem.question.size();
  }
  EXPECT_LE(total / problems.size(), 52u);
}

TEST(Sums, KeepsToTheOperandsAndSteps) {
  SumsSettings settings;
  settings.min_operand = 3;
  settings.max_operand = 9;
  settings.min_steps = settings.max_steps = 2;
  for (const auto& problem : make_sums(1000, Split::test, 1, settings)) {
    EXPECT_EQ(std::count(problem.answer.begin(), problem.answer.end(), '='), 2) << problem.answer;
    const std::string chain = problem.skeleton.substr(problem.skeleton.find(':') + 1);
    for (size_t i = 0; i < chain.size(); i += 2) EXPECT_TRUE(chain[i] >= '3' && chain[i] <= '9') << chain;
  }
}

TEST(Sums, SlipsMakeTheirShareOfAnswersWrongAndChangeNothingElse) {
  SumsSettings settings;
  settings.max_steps = 2;
  const auto right = make_sums(2000, Split::train, 1, settings);
  settings.slips = 0.6;
  const auto slipped = make_sums(2000, Split::train, 1, settings);
  int wrong = 0;
  for (size_t i = 0; i < right.size(); ++i) {
    EXPECT_EQ(slipped[i].question, right[i].question);
    const auto number = [](const std::string& answer) {
      return std::stoi(answer.substr(answer.find("####") + 5));
    };
    const int off = number(slipped[i].answer) - number(right[i].answer);
    EXPECT_LE(std::abs(off), 3);
    EXPECT_GE(number(slipped[i].answer), 0);
    EXPECT_EQ(off == 0, slipped[i].answer == right[i].answer);
    wrong += off != 0;
  }
  EXPECT_NEAR(wrong / 2000.0, 0.6, 0.04);
}

TEST(Sums, RefusesImpossibleSettings) {
  SumsSettings settings;
  settings.max_operand = 1;
  EXPECT_THROW(make_sums(100'000, Split::train, 1, settings), UserError);
  settings.min_operand = 2;
  EXPECT_THROW(settings.check(), UserError);
  settings = {};
  settings.operations = {};
  EXPECT_THROW(settings.check(), UserError);
  settings.operations = {"multiply"};
  EXPECT_NO_THROW(settings.check());
  settings.max_steps = 2;
  EXPECT_THROW(settings.check(), UserError);
}

TEST(Sums, WritesRecordsThatShareTheExamples) {
  const auto path = std::filesystem::path(testing::TempDir()) / "sums_test.jsonl";
  SumsSettings settings;
  write_sums_dataset(path, 20, Split::test, 1, settings);
  const auto problems = make_sums(20, Split::test, 1, settings);
  size_t count = 0;
  for_each_json_line(read_file(path), path.string(), [&](const Json& record, int64_t line) {
    EXPECT_EQ(record, Json({{"question", problems[count].question}, {"answer", problems[count].answer}}));
    ++count;
  });
  EXPECT_EQ(count, 20u);

  settings.shots = 3;
  write_sums_dataset(path, 20, Split::test, 1, settings);
  std::string prefix;
  for_each_json_line(read_file(path), path.string(), [&](const Json& record, int64_t line) {
    const std::string prompt = record.at("prompt");
    const std::string question = str("Q: ", record.at("question").get<std::string>(), "\nA:");
    ASSERT_TRUE(prompt.ends_with(question)) << prompt;
    const std::string examples = prompt.substr(0, prompt.size() - question.size());
    if (prefix.empty()) prefix = examples;
    EXPECT_EQ(examples, prefix);
  });
  EXPECT_EQ(std::count(prefix.begin(), prefix.end(), 'Q'), 3);
  EXPECT_TRUE(prefix.ends_with("\n\n"));
}

// Prompts of supervised fine-tuning must begin like the prompts of the RL run that follows.
TEST(SumsDataset, SftPromptsEqualTheDatasets) {
  DatasetSettings settings;
  settings.path = (std::filesystem::path(::testing::TempDir()) / str("sums_", ::getpid(), ".jsonl")).string();
  for (const int64_t shots : {0, 3}) {
    SumsSettings sums;
    sums.shots = shots;
    write_sums_dataset(settings.path, 30, Split::train, 1, sums);
    const Dataset dataset = read_dataset(settings);
    const auto examples = read_sft(settings);
    ASSERT_EQ(dataset.size(), 30u);
    for (size_t i = 0; i < 30; ++i) {
      EXPECT_EQ(examples[i].prompt, dataset[i].prompt);
      EXPECT_EQ(examples[i].completion, " " + dataset[i].answer);
    }
  }
  std::filesystem::remove(settings.path);
}

TEST(SumsSettingsYaml, ChecksWhatItReads) {
  EXPECT_EQ(
      parse_settings<SumsSettings>("operations: [multiply]\nmax_operand: 9\n", "c.yaml").operations.size(),
      1u);
  EXPECT_THROW(parse_settings<SumsSettings>("operations: [divide]\n", "c.yaml"), UserError);
  EXPECT_THROW(parse_settings<SumsSettings>("min_operand: 30\n", "c.yaml"), UserError);
}

}  // namespace
}  // namespace bough

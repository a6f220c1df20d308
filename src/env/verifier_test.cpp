#include "env/verifier.h"

#include <gtest/gtest.h>

#include <chrono>

#include "base/error.h"

namespace bough {
namespace {

double score(std::string_view completion, std::string_view gold, const VerifierSettings& settings = {}) {
  const NumberVerifier verifier(settings);
  return verifier.verify(completion, verifier.gold(gold, "test")).score;
}

struct VerifierCase {
  const char* completion;
  const char* gold;
  double score;
};

class VerifierCases : public testing::TestWithParam<VerifierCase> {};

TEST_P(VerifierCases, Scores) {
  const auto [completion, gold, expected] = GetParam();
  EXPECT_EQ(score(completion, gold), expected) << "completion: " << completion << "\ngold: " << gold;
}

INSTANTIATE_TEST_SUITE_P(
    Places, VerifierCases,
    testing::Values(
        VerifierCase{"7+5=12 #### 12", "7+5=12 #### 12", 1}, VerifierCase{"7+5=13\n#### 13", "#### 12", 0},
        VerifierCase{"#### 12\nI mean\n#### 13", "13", 1}, VerifierCase{"#### 12 eggs", "12", 1},
        VerifierCase{"####12", "12", 1}, VerifierCase{"#### 7+5=12", "12", 1},
        VerifierCase{"#### \n12", "12", 0}, VerifierCase{"12 ####", "12", 0},
        VerifierCase{"so \\boxed{12} it is, 99", "12", 1}, VerifierCase{"\\boxed{x = 12}", "12", 1},
        VerifierCase{"\\boxed{12\\text{ cm}}", "12", 1}, VerifierCase{"\\boxed{{1{,}200}}", "1200", 1},
        VerifierCase{"\\boxed{-\\frac{1}{2}}", "-0.5", 1}, VerifierCase{"\\boxed{\\$12}", "12", 1},
        VerifierCase{"\\boxed{12", "12", 1}, VerifierCase{"\\boxed{}12", "12", 0},
        VerifierCase{"The answer is 12. There were 3 cats.", "12", 1},
        VerifierCase{"THE ANSWER IS $12.50!", "12.5", 1}, VerifierCase{"**Answer:** 12", "12", 1},
        VerifierCase{"Answer:\n12", "12", 1}, VerifierCase{"the answer is 3\nno, the answer is 4", "4", 1},
        VerifierCase{"The answer is 5.\n#### 6", "6", 1}, VerifierCase{"He has 7, then 12", "12", 1},
        VerifierCase{"12 cats and 3 dogs", "12", 0}, VerifierCase{"", "12", 0},
        VerifierCase{"none", "12", 0}));

INSTANTIATE_TEST_SUITE_P(
    Numbers, VerifierCases,
    testing::Values(
        VerifierCase{"1,000", "1000", 1}, VerifierCase{"1000.0", "1,000", 1},
        VerifierCase{"1,234,567", "1234567", 1}, VerifierCase{"1e3", "1000", 1},
        VerifierCase{"1.5E+3", "1500", 1}, VerifierCase{"15e-1", "1.5", 1}, VerifierCase{"1,20", "120", 0},
        VerifierCase{"1,20", "20", 1}, VerifierCase{"1,0000", "10000", 0},
        VerifierCase{"#### 1,0000", "1000", 0}, VerifierCase{"$12", "12", 1}, VerifierCase{"-$12", "-12", 1},
        VerifierCase{"$-12", "-12", 1}, VerifierCase{"€12", "12", 1}, VerifierCase{"12.", "12", 1},
        VerifierCase{"12.50", "12.5", 1}, VerifierCase{"012", "12", 1}, VerifierCase{".5", "0.5", 1},
        VerifierCase{"-12", "12", 0},
        VerifierCase{"\xE2\x88\x92"
                     "12",
                     "-12", 1},
        VerifierCase{"+12", "12", 1}, VerifierCase{"-0", "0", 1}, VerifierCase{"0.000", "0", 1},
        VerifierCase{"7-5", "5", 1}, VerifierCase{"7-5", "-5", 0}, VerifierCase{"7 - -5", "-5", 1},
        VerifierCase{"f(x)-5", "5", 1}, VerifierCase{"50%", "50", 1}, VerifierCase{"50%", "0.5", 0},
        VerifierCase{"1/2", "0.5", 1}, VerifierCase{"2/4", "1/2", 1}, VerifierCase{"-1/3", "-2/6", 1},
        VerifierCase{"1/3", "0.333", 0}, VerifierCase{"10/2", "5", 1}, VerifierCase{"1/0", "1", 0},
        VerifierCase{"3/4/5", "5", 1}, VerifierCase{"0.1", "0.1000000000000000055511151231257827", 0},
        VerifierCase{"9007199254740993", "9007199254740992", 0}, VerifierCase{"1e400", "1e400", 1},
        VerifierCase{"1e400", "1e401", 0}, VerifierCase{"2e", "2", 1}, VerifierCase{"2em", "2", 1},
        VerifierCase{"125/1e3", "1/8", 1}, VerifierCase{"1e5/1e2", "1000", 1}));

TEST(Verifier, MarkerCanBeRequired) {
  VerifierSettings settings;
  settings.require_marker = true;
  EXPECT_EQ(score("so 12", "12", settings), 0);
  EXPECT_EQ(score("so #### 12", "12", settings), 1);
}

TEST(Verifier, FractionsCanBeOff) {
  VerifierSettings settings;
  settings.fractions = false;
  EXPECT_EQ(score("10/2", "2", settings), 1);
  EXPECT_EQ(score("10/2", "5", settings), 0);
}

TEST(Verifier, SaysWhy) {
  const NumberVerifier verifier;
  const ExactNumber gold = verifier.gold("12", "test");
  EXPECT_EQ(verifier.verify("#### 13", gold).reason, "13 is not the answer");
  EXPECT_EQ(verifier.verify("####", gold).reason, "no number after ####");
  EXPECT_EQ(verifier.verify("#### $12.0 each", gold).extracted, "$12.0");
}

TEST(Verifier, GoldThatIsNotOneNumberIsTheUsersError) {
  const NumberVerifier verifier;
  for (const char* gold : {"", "Paris", "12 km 5 m", "work\n####", "1/0", "1e9999999999999999999"}) {
    try {
      verifier.gold(gold, "sums.jsonl:7");
      FAIL() << gold;
    } catch (const UserError& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with("sums.jsonl:7: ")) << error.what();
    }
  }
}

// A quadratic scan of any of these takes minutes, a linear scan well under a second.
TEST(Verifier, HostileCompletionsTakeLinearTime) {
  const NumberVerifier verifier;
  const ExactNumber gold = verifier.gold("12", "test");
  const ExactNumber third = verifier.gold("1/3", "test");
  const size_t size = 3'000'000;
  const auto repeated = [&](std::string_view unit) {
    std::string text;
    while (text.size() < size) text += unit;
    return text;
  };
  const auto begin = std::chrono::steady_clock::now();
  for (const char* unit : {"1", "1,", "1,111", "1.", "1e", "-", "$", "1/", "#", "\\boxed{", "{", "}{",
                           "answer is ", "a", "answer is 1.", "=", "0", "\\frac{", "####1"}) {
    const Verdict verdict = verifier.verify(repeated(unit), gold);
    EXPECT_EQ(verdict.score, 0) << unit;
    EXPECT_LE(verdict.extracted.size(), 90u) << unit;
  }
  EXPECT_EQ(verifier.verify(str("1", repeated(",111"), "1"), gold).score, 0);
  const std::string digits = repeated("1");
  EXPECT_EQ(verifier.verify(digits, verifier.gold(digits, "test")).score, 1);
  EXPECT_EQ(verifier.verify(str(digits, "/3"), third).score, 0);
  EXPECT_EQ(verifier.verify(str("1e", digits), gold).score, 0);
  EXPECT_EQ(verifier.verify("1e999999999", gold).score, 0);
  EXPECT_EQ(verifier.verify("1e-999999999", gold).score, 0);
  EXPECT_EQ(verifier.verify("0e99999999999999999999", verifier.gold("0", "test")).score, 1);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

}  // namespace
}  // namespace bough

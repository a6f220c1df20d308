#include "env/math_equality.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>

#include "base/error.h"
#include "env/double_double.h"
#include "env/math_expression.h"
#include "env/reward.h"

namespace bough {
namespace {

struct Pair {
  const char* answer;
  const char* reference;
};

class EqualMath : public testing::TestWithParam<Pair> {};
class UnequalMath : public testing::TestWithParam<Pair> {};

TEST_P(EqualMath, BothWays) {
  const auto [answer, reference] = GetParam();
  EXPECT_TRUE(compare_math(answer, reference).equal) << answer << "   against   " << reference;
  EXPECT_TRUE(compare_math(reference, answer).equal) << reference << "   against   " << answer;
}
TEST_P(UnequalMath, BothWays) {
  const auto [answer, reference] = GetParam();
  EXPECT_FALSE(compare_math(answer, reference).equal) << answer << "   against   " << reference;
  EXPECT_FALSE(compare_math(reference, answer).equal) << reference << "   against   " << answer;
}

INSTANTIATE_TEST_SUITE_P(
    Numbers, EqualMath,
    testing::Values(Pair{"42", "42"}, Pair{"42.", "42"}, Pair{"042", "42"}, Pair{"42.0", "42"},
                    Pair{"+42", "42"}, Pair{"-0", "0"}, Pair{".5", "0.5"}, Pair{"1,000", "1000"},
                    Pair{"1{,}000{,}000", "1000000"}, Pair{"1\\,000", "1000"}, Pair{"1,\\!000", "1000"},
                    Pair{"10 000", "10000"}, Pair{"1,234.50", "1234.5"}, Pair{"$42$", "42"},
                    Pair{"\\$42", "42"}, Pair{"$1,000", "1000"}, Pair{"\\(42\\)", "42"},
                    Pair{"-7",
                         "\xE2\x88\x92"
                         "7"},
                    Pair{"1e3", "1000"}, Pair{"1.2e-3", "0.0012"}, Pair{"1.2 \\times 10^5", "120000"},
                    Pair{"3 x 10^5", "300000"}, Pair{"6.02 \\cdot 10^{23}", "6.02e23"},
                    Pair{"2^{10}", "1024"}, Pair{"2**10", "1024"}, Pair{"10^{-3}", "0.001"},
                    Pair{"5!", "120"}, Pair{"\\binom{5}{2}", "10"}, Pair{"50\\%", "50"}, Pair{"50%", "0.5"},
                    Pair{"50%", "\\frac{1}{2}"}, Pair{"12.5\\%", "12.5%"}, Pair{"|-3|", "3"},
                    Pair{"\\left|-3\\right|", "3"}, Pair{"2+3", "5"}, Pair{"2\\cdot 3", "6"},
                    Pair{"7/2", "3.5"}, Pair{"2^{100}", "1267650600228229401496703205376"},
                    Pair{"10^{10^{10}}", "10^{10000000000}"}, Pair{"\\textbf{42}", "42"},
                    Pair{"\\boxed{42}", "42"}));

INSTANTIATE_TEST_SUITE_P(
    Fractions, EqualMath,
    testing::Values(Pair{"\\frac{1}{2}", "0.5"}, Pair{"1/2", "\\frac12"}, Pair{"\\dfrac{3}{4}", "\\tfrac34"},
                    Pair{"2/4", "1/2"}, Pair{"-\\frac{1}{2}", "\\frac{-1}{2}"}, Pair{"\\frac{1}{-2}", "-1/2"},
                    Pair{"3\\frac{1}{2}", "3.5"}, Pair{"3 1/2", "7/2"}, Pair{"-3\\frac{1}{2}", "-3.5"},
                    Pair{"\\frac{1}{3}", "2/6"}, Pair{"\\frac{10}{4}", "2.5"},
                    Pair{"\\frac{\\frac{1}{2}}{3}", "1/6"}, Pair{"1/3+1/6", "1/2"},
                    Pair{"\\frac1{72}", "1/72"}, Pair{"\\frac{1,000}{3}", "1000/3"}, Pair{"0.125", "1/8"},
                    Pair{"(1/2)", "1/2"}, Pair{"{1 \\over 2}", "1/2"},
                    Pair{"\\frac{1}{99999999999999999999}", "1/99999999999999999999"}));

INSTANTIATE_TEST_SUITE_P(
    Units, EqualMath,
    testing::Values(Pair{"5 cm", "5"}, Pair{"5\\text{ cm}", "5"}, Pair{"5 \\text{ cm}^2", "5"},
                    Pair{"5\\mathrm{~m}", "5"}, Pair{"90^\\circ", "90"}, Pair{"90^{\\circ}", "90"},
                    Pair{"90\xC2\xB0", "90"}, Pair{"90 degrees", "90"}, Pair{"12 dollars", "12"},
                    Pair{"\\$12.50", "12.5"}, Pair{"60 miles per hour", "60"}, Pair{"60 km/h", "60"},
                    Pair{"2.5 million", "2500000"}, Pair{"30 percent", "30%"}, Pair{"30 percent", "0.3"},
                    Pair{"\\$3 million", "3000000"}, Pair{"\\frac{1}{2} \\text{ hours}", "1/2"},
                    Pair{"3\\sqrt{2}\\text{ meters}", "3\\sqrt{2}"}, Pair{"5 square units", "5"},
                    Pair{"\\text{Monday}", "Monday"}, Pair{"\\text{(A)}", "A"}, Pair{"(B)", "\\text{B}"},
                    Pair{"\\textbf{(C)}", "C"}, Pair{"\\text{Yes}", "yes"}, Pair{"True", "true"},
                    Pair{"10 \\text{ and } 20", "10, 20"}));

INSTANTIATE_TEST_SUITE_P(
    Roots, EqualMath,
    testing::Values(Pair{"\\sqrt{16}", "4"}, Pair{"\\sqrt{12}", "2\\sqrt{3}"}, Pair{"\\sqrt2", "\\sqrt{2}"},
                    Pair{"sqrt(2)", "\\sqrt{2}"},
                    Pair{"\xE2\x88\x9A"
                         "2",
                         "\\sqrt{2}"},
                    Pair{"\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}"}, Pair{"2^{1/2}", "\\sqrt{2}"},
                    Pair{"\\sqrt[3]{27}", "3"}, Pair{"\\sqrt[3]{-8}", "-2"},
                    Pair{"\\sqrt{2}\\sqrt{3}", "\\sqrt{6}"}, Pair{"\\sqrt{3+2\\sqrt{2}}", "1+\\sqrt{2}"},
                    Pair{"\\sqrt{\\frac{1}{2}}", "\\frac{\\sqrt{2}}{2}"}, Pair{"8^{2/3}", "4"},
                    Pair{"\\sqrt{10^{20}}", "10^{10}"}, Pair{"2\\pi", "\\pi+\\pi"},
                    Pair{"\\frac{\\pi}{2}", "0.5\\pi"}, Pair{"\xCF\x80", "pi"}, Pair{"\\sqrt{-4}", "2i"},
                    Pair{"(1+i)^2", "2i"}, Pair{"\\frac{1}{i}", "-i"},
                    Pair{"\\frac{1+i\\sqrt{3}}{2}", "\\frac{1}{2}+\\frac{\\sqrt{3}}{2}i"},
                    Pair{"2\\sqrt{123456789}", "\\sqrt{493827156}"},
                    Pair{"\\frac{\\sqrt{5}+1}{2}", "\\frac{2}{\\sqrt{5}-1}"}));

INSTANTIATE_TEST_SUITE_P(
    Symbols, EqualMath,
    testing::Values(Pair{"(x+1)^2", "x^2+2x+1"}, Pair{"2x+3", "3+2x"}, Pair{"x(x-1)", "x^2-x"},
                    Pair{"\\frac{x^2-1}{x-1}", "x+1"}, Pair{"\\frac{2x}{4}", "x/2"}, Pair{"a(b+c)", "ab+ac"},
                    Pair{"2xy", "2yx"}, Pair{"x_1+x_2", "x_{2}+x_{1}"},
                    Pair{"\\frac{1}{x}+\\frac{1}{y}", "\\frac{x+y}{xy}"}, Pair{"(x+y)^{10}", "(y+x)^{10}"},
                    Pair{"x^{-1}", "1/x"}, Pair{"\\sin^2 x+\\cos^2 x", "1"},
                    Pair{"\\sin 2x", "2\\sin x\\cos x"}, Pair{"\\sin(x)", "\\sin x"},
                    Pair{"\\sin\\frac{\\pi}{6}", "1/2"}, Pair{"\\ln 8", "3\\ln 2"}, Pair{"\\log_2 8", "3"},
                    Pair{"\\log 1000", "3"}, Pair{"\\frac{\\ln 8}{\\ln 2}", "3"},
                    Pair{"e^{x+1}", "e\\cdot e^x"}, Pair{"\\exp(x)", "e^x"}, Pair{"e^{\\ln 2}", "2"},
                    Pair{"\\tan x", "\\frac{\\sin x}{\\cos x}"}, Pair{"\\arctan 1", "\\frac{\\pi}{4}"},
                    Pair{"\\cos^{-1}(0)", "\\pi/2"}, Pair{"2^{x+1}", "2\\cdot 2^x"},
                    Pair{"\\sqrt{x^2+2x+1}", "\\sqrt{(x+1)^2}"}, Pair{"2^n n!", "n! 2^n"},
                    Pair{"\\frac{n(n+1)}{2}", "\\frac{n^2+n}{2}"}, Pair{"\\cosh x", "\\frac{e^x+e^{-x}}{2}"},
                    Pair{"\\sqrt{x}\\sqrt{x}", "x"}, Pair{"\\theta", "\\theta"}, Pair{"-(x-3)", "3-x"}));

INSTANTIATE_TEST_SUITE_P(UprightConstants, EqualMath,
                         testing::Values(Pair{"\\mathrm{e}^2", "e^2"}, Pair{"3+2\\mathrm{i}", "3+2i"},
                                         Pair{"2\\text{i}", "2i"}, Pair{"(1+\\mathrm{i})^2", "2i"},
                                         Pair{"\\operatorname{e}^{x}", "e^x"},
                                         Pair{"e^{\\mathrm{i}x}", "e^{ix}"}, Pair{"\\exp(11)", "e^{11}"},
                                         Pair{"\\exp(1/2)", "\\sqrt{e}"}, Pair{"\\exp(-x)", "\\frac{1}{e^x}"},
                                         Pair{"\\exp^2(3)", "\\mathrm{e}^6"}));

INSTANTIATE_TEST_SUITE_P(
    Collections, EqualMath,
    testing::Values(Pair{"[0, 1)", "[0,1)"}, Pair{"\\left[0, \\frac{1}{2}\\right)", "[0, 0.5)"},
                    Pair{"(-\\infty, 3]", "(-inf, 3]"},
                    Pair{"(-\\infty,0)\\cup(1,\\infty)", "(1,\\infty) \\cup (-\\infty,0)"},
                    Pair{"x \\in [1,2]", "[1,2]"}, Pair{"x>3", "(3,\\infty)"}, Pair{"1 \\le x < 2", "[1,2)"},
                    Pair{"x \\leq 5", "5 \\ge x"}, Pair{"2 > x > 1", "1<x<2"},
                    Pair{"\\mathbb{R}", "(-\\infty,\\infty)"}, Pair{"\\{1,2,3\\}", "\\{3,2,1\\}"},
                    Pair{"\\{1,1,2\\}", "\\{1,2\\}"}, Pair{"1, 2", "2,1"}, Pair{"1 or 2", "1,2"},
                    Pair{"1 \\text{ or } 2", "2, 1"}, Pair{"\\{1, 2\\}", "1,2"}, Pair{"\\pm 3", "3,-3"},
                    Pair{"1\\pm\\sqrt{2}", "1+\\sqrt{2}, 1-\\sqrt{2}"}, Pair{"\\emptyset", "\\{\\}"},
                    Pair{"(1, 2)", "\\left(1,2\\right)"}, Pair{"(\\frac{1}{2}, 3)", "(0.5,3)"},
                    Pair{"(1,2,3)", "[1,2,3]"}, Pair{"(1,2),(3,4)", "(3,4), (1,2)"}, Pair{"x=3", "3"},
                    Pair{"x = 3", "3 = x"}, Pair{"y=2x+1", "2x-y+1=0"}, Pair{"f(x)=x^2", "x^2"},
                    Pair{"7+5=12", "12"}, Pair{"x=1 \\text{ or } x=2", "1,2"}, Pair{"x=\\pm 2", "2, -2"},
                    Pair{"2x+4y=6", "x+2y=3"}, Pair{"\\text{Area} = 5", "5"},
                    Pair{"\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
                         "\\begin{bmatrix}1&2\\\\3&\\frac{8}{2}\\end{bmatrix}"},
                    Pair{"\\infty", "inf"}, Pair{"-\\infty", "-\\infty"}, Pair{"(x+1, 2y)", "(1+x, y+y)"},
                    Pair{"\\langle 1, 2\\rangle", "(1,2)"}));

INSTANTIATE_TEST_SUITE_P(
    All, UnequalMath,
    testing::Values(
        Pair{"42", "43"}, Pair{"42", "-42"}, Pair{"1,000", "100"}, Pair{"0.333", "1/3"}, Pair{"3.14", "\\pi"},
        Pair{"1.414", "\\sqrt{2}"}, Pair{"9007199254740993", "9007199254740992"},
        Pair{"100000000000000000001", "100000000000000000000"}, Pair{"50%", "5"}, Pair{"50%", "51%"},
        Pair{"50%", "50.5"}, Pair{"2e3", "2e4"}, Pair{"10^{10^{10}}", "10^{10^{10}}+1"},
        Pair{"10^{10^{10}}", "10^{9999999999}"}, Pair{"1/0", "1"}, Pair{"0/0", "0"}, Pair{"1/0", "2/0"},
        Pair{"\\frac{1}{2}", "2"}, Pair{"3\\frac{1}{2}", "3/2"}, Pair{"3 4", "12"}, Pair{"3 4", "34"},
        Pair{"\\sqrt{2}", "2"}, Pair{"\\sqrt{2}", "-\\sqrt{2}"}, Pair{"\\sqrt{10^{80}+1}", "10^{40}"},
        Pair{"\\sqrt{x^2}", "x"}, Pair{"\\sqrt[3]{2}", "\\sqrt{2}"},
        // Near misses, which differ by 1e-30, 1e-17, 1e-9, 1e-32, 1e-28.
        Pair{"e^{\\pi\\sqrt{163}}", "262537412640768744"}, Pair{"\\frac{3\\ln 640320}{\\sqrt{163}}", "\\pi"},
        Pair{"\\frac{\\ln(640320^3+744)}{\\sqrt{163}}", "\\pi"}, Pair{"\\sqrt[4]{\\frac{2143}{22}}", "\\pi"},
        Pair{"\\sqrt[100]{10^{100}+1}", "10"}, Pair{"\\sin(1e-9)", "1e-9"}, Pair{"1+e^{-100}", "1"},
        Pair{"\\tanh 50", "1"}, Pair{"e^{\\pi}-\\pi", "20"}, Pair{"\\arctan(10^{30})", "\\pi/2"},
        Pair{"355/113", "\\pi"}, Pair{"\\sqrt{2}+\\sqrt{3}", "\\pi"}, Pair{"x+1", "x+2"}, Pair{"x", "y"},
        Pair{"x^2", "x^3"}, Pair{"2x", "x"}, Pair{"(x+1)^2", "x^2+1"}, Pair{"\\sin x", "\\cos x"},
        Pair{"\\sin 2x", "2\\sin x"}, Pair{"\\ln 2", "\\log 2"}, Pair{"e^x", "x^e"},
        Pair{"\\exp(11)", "e^{12}"}, Pair{"\\mathrm{e}", "\\mathrm{i}"}, Pair{"3+2\\mathrm{i}", "3-2i"},
        Pair{"\\mathrm{E}^2", "e^2"}, Pair{"x + 10^{-40}", "x"}, Pair{"\\sqrt{x^2+10^{-40}}", "\\sqrt{x^2}"},
        Pair{"i", "-i"}, Pair{"2+3i", "2-3i"}, Pair{"x_1", "x_2"}, Pair{"x/0", "x"}, Pair{"x", "X"},
        Pair{"n!", "n"}, Pair{"[0,1)", "(0,1)"}, Pair{"[0,1]", "[0,1)"}, Pair{"(0,1)", "(0,2)"},
        Pair{"(-\\infty,0)", "(0,\\infty)"}, Pair{"(0,1)\\cup(2,3)", "(0,1)"}, Pair{"x>3", "[3,\\infty)"},
        Pair{"x>3", "x<3"}, Pair{"x>3", "y>3"}, Pair{"x>3", "3"}, Pair{"(1,2)", "(2,1)"},
        Pair{"(1,2)", "(1,2,3)"}, Pair{"(1,2)", "1,2"}, Pair{"\\{1,2\\}", "\\{1,2,3\\}"},
        Pair{"\\{1,2\\}", "\\{1,3\\}"}, Pair{"1,2", "1"}, Pair{"\\{1\\}", "1"},
        Pair{"\\{1,200\\}", "\\{1200\\}"}, Pair{"\\pm 3", "3"}, Pair{"\\emptyset", "0"}, Pair{"x=3", "4"},
        Pair{"x=3", "y=3"}, Pair{"2x=6", "6"}, Pair{"y=2x+1", "y=2x-1"}, Pair{"x=x", "y=y"},
        Pair{"7+5=13", "12"}, Pair{"7+5=13", "13"}, Pair{"x=3", "x=-3"},
        Pair{"\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}"},
        Pair{"\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"}, Pair{"A", "B"},
        Pair{"cat", "act"}, Pair{"2 dozen", "2"}, Pair{"5 \\text{ not}", "5"}, Pair{"3 or more", "3"},
        Pair{"2 squared", "2"}, Pair{"5 million", "5"}, Pair{"5 million", "5 billion"},
        Pair{"Monday", "Tuesday"}, Pair{"yes", "no"}, Pair{"\\infty", "-\\infty"},
        Pair{"\\infty", "10^{100}"}, Pair{"", "1"}, Pair{"\\text{no idea}", "5"}, Pair{"1011_2", "1011"},
        Pair{"1011_2", "11"}, Pair{"3:4", "4:3"}, Pair{"12:30", "1230"}, Pair{"f(x)=x^2", "x^3"},
        Pair{"\\frac{}{2}", "0"}, Pair{"1+", "1"}, Pair{"(1", "1"}, Pair{"\\frac{1}", "1"}));

TEST(MathEquality, AReferenceThatIsNotReadIsComparedAsText) {
  for (const auto& [answer, reference] :
       {Pair{"1011_{2}", "1011_2"}, Pair{"3 : 4", "3:4"},
        Pair{"\\begin{cases} x \\end{cases}", "\\begin{cases}x\\end{cases}"}}) {
    const MathComparison comparison = compare_math(answer, reference);
    EXPECT_TRUE(comparison.equal) << answer;
    EXPECT_TRUE(comparison.by_text) << answer;
  }
  EXPECT_FALSE(compare_math("x^{2", "x^2").equal);  // an unreadable answer is wrong
  EXPECT_FALSE(compare_math("3:5", "3:4").equal);
  EXPECT_TRUE(compare_math("3:5", "3:4").by_text);
  EXPECT_FALSE(compare_math("3:5", "3/4").by_text);
}

TEST(MathEquality, FindsTheFinalAnswer) {
  EXPECT_EQ(find_math_answer("so \\boxed{1} or rather \\boxed{\\frac{1}{\\sqrt{2}}}.", false),
            "\\frac{1}{\\sqrt{2}}");
  EXPECT_EQ(find_math_answer("\\boxed{\\{1, 2\\}}", false), "\\{1, 2\\}");
  EXPECT_EQ(find_math_answer("\\boxed 7 it is", false), "7");
  EXPECT_EQ(find_math_answer("\\boxed{12", false), "");  // truncated
  EXPECT_EQ(find_math_answer("<think>\\boxed{3}</think> The answer is 4.", false), "4");
  EXPECT_EQ(find_math_answer("<answer> x = 3 </answer>", false), "x = 3");
  EXPECT_EQ(find_math_answer("5 + 7 = 12\n#### 12\n", false), "12");
  EXPECT_EQ(find_math_answer("Thus the answer is $\\frac{1}{2}$. Done.", false), "\\frac{1}{2}");
  EXPECT_EQ(find_math_answer("**Answer:** 3.5 cm\nBye", false), "3.5 cm");
  EXPECT_EQ(find_math_answer("First $x=1$ and then, after a while, we get $y = 2$ as wanted.", false),
            "y = 2");
  EXPECT_EQ(find_math_answer("The first costs $5 and then, some days later, another one $6", false), "$6");
  EXPECT_EQ(find_math_answer("There are 3 cats and 4 dogs, so that 7 animals are there.", false), "7");
  EXPECT_EQ(find_math_answer("x^2 + 1", false), "x^2 + 1");
  EXPECT_EQ(find_math_answer("I have no idea what this is all about, I am afraid.", false), "");
  EXPECT_EQ(find_math_answer("it is 7", true), "");
  EXPECT_EQ(find_math_answer("", false), "");
  EXPECT_EQ(math_reference("work\n#### 12"), "12");
  EXPECT_EQ(math_reference("We get \\boxed{3}."), "3");
  EXPECT_EQ(math_reference(" [0,1) "), "[0,1)");
}

TEST(MathReward, ScoresAndChecks) {
  const auto reward = make_math_reward();
  Problem problem;
  problem.id = "7";
  problem.answer = "\\frac{1}{2}";
  EXPECT_EQ(reward->score({"", "It is \\boxed{0.5}", &problem}).reward, 1);
  EXPECT_EQ(reward->score({"", "It is \\boxed{0.6}", &problem}).message, "'0.6' is not the answer");
  const RewardResult none = reward->score({"", "", &problem});
  EXPECT_EQ(none.reward, 0);
  EXPECT_TRUE(none.valid);
  problem.answer = "3:4";
  EXPECT_NE(reward->score({"", "\\boxed{4:3}", &problem}).message.find("compared as text"),
            std::string::npos);
  EXPECT_NO_THROW(reward->check(Dataset({problem}, "data.jsonl")));
  problem.answer = " ";
  EXPECT_THROW(reward->check(Dataset({problem}, "data.jsonl")), UserError);
}

// Adversarial completions are wrong, and rejected quickly. Without the bounds each takes minutes or overflows
// the stack.
TEST(MathEquality, HostileAnswersAreWrongAndCheap) {
  const auto repeated = [](std::string_view unit, size_t size) {
    std::string text;
    while (text.size() < size) text += unit;
    return text;
  };
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::string> adversarial;
  for (const char* unit : {"(",
                           "[",
                           "{",
                           "\\{",
                           "|",
                           "-",
                           "\\frac{",
                           "\\sqrt{",
                           "\\sqrt",
                           "2^",
                           "x^{",
                           "!",
                           "1,",
                           "\\left(",
                           "1+",
                           "9",
                           "0",
                           ".",
                           "\\",
                           "$",
                           "\\frac{1}{",
                           "\\frac",
                           "3\\frac{",
                           "sin ",
                           "\\sin(",
                           "\\text{",
                           "\\boxed{",
                           "a",
                           "1/",
                           "^",
                           "_",
                           "\\pm",
                           "=",
                           "<",
                           "x=",
                           "\\cup",
                           "\\begin{pmatrix}",
                           "&",
                           "\\\\",
                           "\xE2\x88\x9A",
                           "\xFF",
                           "(1,",
                           "2000!+",
                           "1/x+",
                           "\\sin x+",
                           "^{\\circ}",
                           "\\pm 1,",
                           "1e99 "}) {
    for (const size_t size : {50u, 1000u, 3900u, 1'000'000u}) {
      adversarial.push_back(repeated(unit, size));
      adversarial.push_back("1" + adversarial.back());
    }
  }
  for (const char* text : {"10^{10^{10^{10}}}",
                           "9^{9^{9^{9^{9}}}}",
                           "(10^{10})!",
                           "100000!",
                           "2000!!!!!",
                           "\\binom{10^9}{5*10^8}",
                           "1e999999999999999999999",
                           "1e-9999999999",
                           "\\sqrt[10^{10}]{2}",
                           "x^{10^{18}}",
                           "2^{2^{2^{2^{2^{2^{2}}}}}}",
                           "\\frac{1}{10^{10^{10}}}",
                           "0^{-1}",
                           "0^0",
                           "((((((((((1))))))))))^{((2))}",
                           "\\log_{0} 5",
                           "\\ln 0",
                           "\\sqrt{-1}^{\\sqrt{-1}}",
                           "\\tan(\\pi/2)",
                           "\\left",
                           "}",
                           "{",
                           "\\begin{pmatrix}",
                           "\\end{pmatrix}",
                           "a_{",
                           "\\frac"})
    adversarial.push_back(text);
  for (const std::string& answer : adversarial) {
    for (const char* reference : {"41", "\\sqrt{5}", "\\{1,2,3,x,\\sqrt{2}\\}"}) {
      const auto one = std::chrono::steady_clock::now();
      EXPECT_FALSE(compare_math(answer, reference).equal)
          << answer.substr(0, 60) << " size " << answer.size();
      EXPECT_LT(std::chrono::steady_clock::now() - one, std::chrono::seconds(10)) << answer.substr(0, 60);
    }
    find_math_answer(answer, false);
    compare_math("41", answer);
  }
  const std::string digits = repeated("7", 1'000'000);
  EXPECT_TRUE(compare_math(digits, digits + ".0").equal);
  EXPECT_FALSE(compare_math(digits, digits + "7").equal);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

TEST(DoubleDouble, FunctionsAreGoodToThirtyDigits) {
  const auto near = [](DoubleDouble a, DoubleDouble b) {
    return std::abs((a - b).high) <= 1e-29 * std::max(1.0, std::abs(b.high));
  };
  EXPECT_TRUE(near(exponential(1), DoubleDouble(2.718281828459045091e+00, 1.445646891729250158e-16)));
  EXPECT_TRUE(near(logarithm(10), DoubleDouble(2.302585092994045901e+00, -2.170756223382249351e-16)));
  EXPECT_TRUE(near(square_root(2), DoubleDouble(1.414213562373095145e+00, -9.667293313452913451e-17)));
  EXPECT_TRUE(near(DoubleDouble(4) * arc_tangent(1), real_pi()));
  for (double x = -20; x < 20; x += 0.37) {
    EXPECT_TRUE(near(sine(x) * sine(x) + cosine(x) * cosine(x), 1)) << x;
    EXPECT_TRUE(near(logarithm(exponential(x)), x)) << x;
    EXPECT_TRUE(near(sine(DoubleDouble(x) + DoubleDouble(x)), DoubleDouble(2) * sine(x) * cosine(x))) << x;
  }
  EXPECT_FALSE(is_finite(DoubleDouble(1) / DoubleDouble(0)));
  EXPECT_FALSE(is_finite(logarithm(0)));
  EXPECT_FALSE(is_finite(square_root(-1)));
  EXPECT_FALSE(is_finite(exponential(1e6)));
}

}  // namespace
}  // namespace bough

#include "text/unicode_regex.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace bough::unicode {
namespace {

std::vector<std::string> matches(const char* pattern, std::string_view subject) {
  std::vector<std::string> found;
  for (const Match& match : Regex::compile(pattern, "test").find_all(subject))
    found.emplace_back(subject.substr(match.begin, match.end - match.begin));
  return found;
}

using Texts = std::vector<std::string>;

TEST(UnicodeRegex, FindsAll) {
  EXPECT_EQ(matches(R"(\p{L}+|\p{N})", "ab1é23"), (Texts{"ab", "1", "é", "2", "3"}));
  EXPECT_EQ(matches(R"(\s+(?!\S)|\s+)", "a   b  "), (Texts{"  ", " ", "  "}));
  EXPECT_EQ(matches("(?i:'s|'ll)", "'S'LL'x"), (Texts{"'S", "'LL"}));
  EXPECT_EQ(matches("x", ""), Texts{});
}

// As in Oniguruma, no empty match lies directly after another match.
TEST(UnicodeRegex, EmptyMatches) {
  EXPECT_EQ(matches("b*", "abbé"), (Texts{"", "bb", ""}));
  EXPECT_EQ(matches("b*", "é"), (Texts{"", ""}));
}

TEST(UnicodeRegex, LiteralsAreNotPatterns) {
  EXPECT_EQ(Regex::literal("a.*").find_all("aaa.*").size(), 1u);
  EXPECT_EQ(Regex::literal("\u1C89").find_all("x\u1C89").size(), 1u);
}

// Backtracking over a long run must not reach PCRE2's default limit.
TEST(UnicodeRegex, LongSubjects) {
  const std::string spaces(1 << 20, ' ');
  EXPECT_EQ(Regex::compile(R"(\s*[\r\n]+|\s+(?!\S)|\s+)", "test").find_all(spaces + "a").size(), 2u);
  EXPECT_EQ(Regex::compile(R"((?:a|b)+c|a)", "test").find_all(std::string(1 << 12, 'a')).size(), 1u << 12);
}

TEST(UnicodeRegex, AcceptsPatternsOfKnownModels) {
  for (
      const char* pattern :
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*)",
       R"([一-龥぀-ゟ゠-ヿ]+)",
       R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)",
       R"('(?i:[sdmt]|ll)|a?+b*+c++|[\x{4E00}-\x{9FA5}\x41]|\P{L}|\p{^N}|[a-]|[-a])"}) {
    EXPECT_NO_THROW(Regex::compile(pattern, "test")) << pattern;
  }
}

TEST(UnicodeRegex, RefusesPatternsWhoseMeaningDependsOnTheEngine) {
  for (const char* pattern : {"^a",           "a$",       ".",          R"(\w)",      R"(\W)",
                              R"(\b)",        R"(\h)",    R"(\v)",      R"(\R)",      R"(\X)",
                              R"(\1)",        R"(\k<a>)", R"(\A)",      R"(\p{Han})", R"(\p{Alphabetic})",
                              R"(\pL)",       R"(\p{L)",  R"(\x80)",    R"(\x{110)",  "[[:alpha:]]",
                              "[a[b]]",       "[a&&b]",   "[]a]",       "[a",         "[b-a]",
                              "(?<=a)b",      "(?<n>a)",  "(?i)a",      "(?#c)",      "(*FAIL)",
                              "(a",           "a)",       "a{2}+",      "a{2}?",      "a{,2}",
                              "a{x}",         "{",        "(?i:ss)",    "(?i:é)",     "(?i:[^a])",
                              R"((?i:[\s]))", "(?i:[é])", "(?i:[a-é])", "\u1C89",     "[\u1C80-\u1D00]",
                              "*a",           "a**b\\"}) {
    EXPECT_THROW(Regex::compile(pattern, "test"), UserError) << pattern;
  }
}

}  // namespace
}  // namespace bough::unicode

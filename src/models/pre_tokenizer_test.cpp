#include "models/pre_tokenizer.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace bough {
namespace {

using Texts = std::vector<std::string>;

Json byte_level(bool use_regex, bool add_prefix_space = false) {
  return {{"type", "ByteLevel"}, {"use_regex", use_regex}, {"add_prefix_space", add_prefix_space}};
}

Texts words(const Json& description, std::string_view text) {
  Texts found;
  PreTokenizer::from_json(description, "test").split(text, [&](std::string_view word) {
    found.emplace_back(word);
  });
  return found;
}

Texts split(const char* kind, const char* pattern, const char* behavior, bool invert, std::string_view text) {
  const Json step = {
      {"type", "Split"}, {"pattern", {{kind, pattern}}}, {"behavior", behavior}, {"invert", invert}};
  return words({{"type", "Sequence"}, {"pretokenizers", {step, byte_level(false)}}}, text);
}

// The examples are those of the documentation of SplitDelimiterBehavior in `tokenizers`.
TEST(PreTokenizer, Behaviors) {
  const char* text = "the-final--countdown";
  const auto by = [&](const char* behavior) { return split("String", "-", behavior, false, text); };
  EXPECT_EQ(by("Removed"), (Texts{"the", "final", "countdown"}));
  EXPECT_EQ(by("Isolated"), (Texts{"the", "-", "final", "-", "-", "countdown"}));
  EXPECT_EQ(by("Contiguous"), (Texts{"the", "-", "final", "--", "countdown"}));
  EXPECT_EQ(by("MergedWithPrevious"), (Texts{"the-", "final-", "-", "countdown"}));
  EXPECT_EQ(by("MergedWithNext"), (Texts{"the", "-final", "-", "-countdown"}));
}

TEST(PreTokenizer, InvertSwapsMatchesAndTheRest) {
  EXPECT_EQ(split("Regex", "[a-z]+", "Removed", true, "ab1cd"), (Texts{"ab", "cd"}));
}

TEST(PreTokenizer, Gpt2Words) {
  EXPECT_EQ(words(byte_level(true), "It's  42 x!\n"), (Texts{"It", "'s", " ", " 42", " x", "!", "\n"}));
  EXPECT_EQ(words(byte_level(true), ""), Texts{});
  EXPECT_EQ(words(byte_level(false), " a b"), (Texts{" a b"}));
}

TEST(PreTokenizer, PrefixSpaceGoesBeforeEveryPiece) {
  EXPECT_EQ(words(byte_level(true, true), "a b"), (Texts{" a", " b"}));
  const Json digits = {{"type", "Digits"}, {"individual_digits", true}};
  EXPECT_EQ(words({{"type", "Sequence"}, {"pretokenizers", {digits, byte_level(false, true)}}}, "a12 b"),
            (Texts{" a", " 1", " 2", " b"}));
}

TEST(PreTokenizer, DigitsTogetherOrAlone) {
  const auto by = [](bool each) {
    const Json digits = {{"type", "Digits"}, {"individual_digits", each}};
    return words({{"type", "Sequence"}, {"pretokenizers", {digits, byte_level(false)}}}, "a12Ⅷb");
  };
  EXPECT_EQ(by(false), (Texts{"a", "12Ⅷ", "b"}));
  EXPECT_EQ(by(true), (Texts{"a", "1", "2", "Ⅷ", "b"}));
}

// U+1C89 and U+105C0 are letters since Unicode 16, U+180E is no space since Unicode 6.3.
TEST(PreTokenizer, ClassesFollowTheNewerUnicode) {
  EXPECT_EQ(words(byte_level(true), "a\u1C89\U000105C0 b"), (Texts{"a\u1C89\U000105C0", " b"}));
  EXPECT_EQ(split("Regex", R"(\s)", "Isolated", false, "a\u180Eb"), (Texts{"a\u180Eb"}));
}

TEST(PreTokenizer, RefusesByName) {
  EXPECT_THROW(words({{"type", "Metaspace"}}, ""), UserError);
  EXPECT_THROW(words(nullptr, ""), UserError);
  EXPECT_THROW(words({{"type", "Digits"}}, ""), UserError) << "no ByteLevel";
  EXPECT_THROW(words({{"type", "Sequence"}, {"pretokenizers", {byte_level(true), byte_level(true)}}}, ""),
               UserError);
  EXPECT_THROW(split("Regex", "a", "Sideways", false, ""), UserError);
  EXPECT_THROW(split("Regex", "", "Isolated", false, ""), UserError);
}

}  // namespace
}  // namespace bough

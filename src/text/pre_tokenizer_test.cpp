#include "text/pre_tokenizer.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "text/unicode_text.h"

namespace bough {
namespace {

using Texts = std::vector<std::string>;

Json byte_level(bool use_regex, bool add_prefix_space = false) {
  return {{"type", "ByteLevel"}, {"use_regex", use_regex}, {"add_prefix_space", add_prefix_space}};
}

Texts words(const Json& description, std::string_view text) {
  Texts found;
  const TextStart start{text.empty() ? 0 : unicode::decode(text).length, false};
  PreTokenizer::from_json(description, "test").split(text, start, [&](std::string_view word) {
    found.emplace_back(word);
  });
  return found;
}

Json metaspace(const char* scheme, bool split = true) {
  return {{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", scheme}, {"split", split}};
}

Json sequence(const std::vector<Json>& parts) {
  return {{"type", "Sequence"}, {"pretokenizers", parts}};
}

std::string refusal_of(const Json& description) {
  try {
    PreTokenizer::from_json(description, "test");
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

Texts split(const char* kind, const char* pattern, const char* behavior, bool invert, std::string_view text) {
  const Json step = {
      {"type", "Split"}, {"pattern", {{kind, pattern}}}, {"behavior", behavior}, {"invert", invert}};
  return words({{"type", "Sequence"}, {"pretokenizers", {step, byte_level(false)}}}, text);
}

// The examples are those in the documentation of SplitDelimiterBehavior in `tokenizers`.
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

// U+1C89 and U+105C0 are letters since Unicode 16. U+180E is no space since Unicode 6.3.
TEST(PreTokenizer, ClassesFollowTheNewerUnicode) {
  EXPECT_EQ(words(byte_level(true), "a\u1C89\U000105C0 b"), (Texts{"a\u1C89\U000105C0", " b"}));
  EXPECT_EQ(split("Regex", R"(\s)", "Isolated", false, "a\u180Eb"), (Texts{"a\u180Eb"}));
}

TEST(PreTokenizer, NoneLeavesTheTextWhole) {
  EXPECT_EQ(words(nullptr, "a b"), (Texts{"a b"}));
  EXPECT_FALSE(PreTokenizer::from_json(nullptr, "test").byte_level());
}

TEST(PreTokenizer, MetaspaceMarksSpaces) {
  EXPECT_EQ(words(metaspace("always"), "a  b"), (Texts{"▁a", "▁", "▁b"}));
  EXPECT_EQ(words(metaspace("always", false), "a  b"), (Texts{"▁a▁▁b"}));
  EXPECT_EQ(words(metaspace("always"), " a"), (Texts{"▁a"})) << "there is one already";
  EXPECT_EQ(words(metaspace("never"), "a b"), (Texts{"a", "▁b"}));
}

TEST(PreTokenizer, MetaspaceFirstIsForTheTrueBeginning) {
  const Json digits = {{"type", "Digits"}};
  EXPECT_EQ(words(sequence({digits, metaspace("first")}), "a1b"), (Texts{"▁a", "1", "b"}));
  EXPECT_EQ(words(sequence({digits, metaspace("always")}), "a1b"), (Texts{"▁a", "▁1", "▁b"}));
  const auto from = [](const TextStart& start) {
    Texts found;
    PreTokenizer::from_json(metaspace("first"), "test").split("ab", start, [&](std::string_view word) {
      found.emplace_back(word);
    });
    return found;
  };
  EXPECT_EQ(from({1, false}), (Texts{"▁ab"}));
  EXPECT_EQ(from({0, false}), (Texts{"ab"})) << "the stretch begins later";
}

// Normalizes the text, cuts it by `pattern`, and applies Metaspace with prepend scheme "first". The start of
// `text` gets a ▁ in front, even if normalization has made several pieces of the text, as in `tokenizers`
// 0.23.
std::string marked(const Json& normalizer, const std::string& text, const std::string& pattern) {
  TextStart start{unicode::decode(text).length, false};
  const std::string normalized = Normalizer::from_json(normalizer, "test").normalize(text, start);
  const Json cut = {{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}};
  std::string result;
  PreTokenizer::from_json(sequence({cut, metaspace("first", false)}), "test")
      .split(normalized, start, [&](std::string_view word) { result += word; });
  return result;
}

TEST(PreTokenizer, NormalizersKeepTrackOfTheTrueBeginning) {
  const Json nfc = {{"type", "NFC"}};
  const Json strip = {{"type", "Strip"}, {"strip_left", true}, {"strip_right", true}};
  const auto replace = [](const char* from, const char* to) {
    return Json{{"type", "Replace"}, {"pattern", {{"String", from}}}, {"content", to}};
  };
  EXPECT_EQ(marked(nfc, "e\u0301a", "a"), "▁éa");
  EXPECT_EQ(marked(nfc, "\u0958a", "\u0915"), "▁\u0915▁\u093Ca");
  EXPECT_EQ(marked(strip, "  ab", "a"), "ab");
  EXPECT_EQ(marked(strip, "ab  ", "a"), "▁ab");
  EXPECT_EQ(marked(replace("a", "bc"), "ab", "[abc]"), "▁b▁cb");
  EXPECT_EQ(marked(replace("ab", "c"), "abb", "[abc]"), "cb");
  const Json prepend = {{"type", "Prepend"}, {"prepend", "_"}};
  const Json both = {{"type", "Sequence"}, {"normalizers", {prepend, nfc}}};
  EXPECT_EQ(marked(both, "e\u0301a", "_"), "▁_▁éa");
}

TEST(PreTokenizer, NothingIsPutInFrontOfAContinuation) {
  for (const Json& description : {metaspace("first"), metaspace("always"), byte_level(false, true)}) {
    Texts found;
    PreTokenizer::from_json(description, "test").split("ab", {1, true}, [&](std::string_view word) {
      found.emplace_back(word);
    });
    EXPECT_EQ(found, (Texts{"ab"})) << description;
  }
}

TEST(PreTokenizer, StepsAfterByteLevelSeeCharacters) {
  const Json digits = {{"type", "Digits"}};
  EXPECT_EQ(words(sequence({byte_level(false), digits}), "é 1"), (Texts{"Ã©Ġ", "1"}));
  EXPECT_FALSE(PreTokenizer::from_json(sequence({byte_level(false), digits}), "test").byte_level());
}

TEST(PreTokenizer, RefusesByName) {
  EXPECT_NE(refusal_of({{"type", "BertPreTokenizer"}}).find("BertPreTokenizer"), std::string::npos);
  EXPECT_NE(refusal_of({{"type", "Metaspace"}}).find("replacement"), std::string::npos);
  Json two = metaspace("always");
  two["replacement"] = "ab";
  EXPECT_NE(refusal_of(two).find("one character"), std::string::npos);
  two["replacement"] = "▁";
  two["add_prefix_space"] = false;
  EXPECT_NE(refusal_of(two).find("\"never\""), std::string::npos) << "`tokenizers` refuses this as well";
  EXPECT_NE(refusal_of(metaspace("sometimes")).find("sometimes"), std::string::npos);
  EXPECT_THROW(split("Regex", "a", "Sideways", false, ""), UserError);
  EXPECT_THROW(split("Regex", "", "Isolated", false, ""), UserError);
}

}  // namespace
}  // namespace bough

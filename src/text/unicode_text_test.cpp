#include "text/unicode_text.h"

#include <gtest/gtest.h>

#include "text/unicode_tables.h"

namespace bough::unicode {
namespace {

TEST(UnicodeText, DecodesWhatAppendEncodes) {
  for (char32_t c = 0; c < 0x110000; c += c < 0x3000 ? 1 : 97) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    append(text, c);
    const Decoded decoded = decode(text + "\x80");
    ASSERT_TRUE(decoded.valid);
    ASSERT_EQ(decoded.code_point, c);
    ASSERT_EQ(decoded.length, text.size());
  }
}

TEST(UnicodeText, FindsTheFirstInvalidByte) {
  EXPECT_EQ(find_invalid("añ€👍"), std::nullopt);
  EXPECT_EQ(find_invalid(std::string("a\0b", 3)), std::nullopt);
  EXPECT_EQ(find_invalid("é\xC3"), 2u);
  EXPECT_EQ(find_invalid("\xC0\x80"), 0u) << "overlong";
  EXPECT_EQ(find_invalid("a\xE0\x80\x80"), 1u) << "overlong";
  EXPECT_EQ(find_invalid("\xED\xBF\xBF"), 0u) << "a surrogate";
  EXPECT_EQ(find_invalid("\xF4\x90\x80\x80"), 0u) << "beyond U+10FFFF";
  EXPECT_EQ(find_invalid("\x80"), 0u);
}

// Each maximal part that is not UTF-8 becomes one U+FFFD. The example is from the Unicode standard (chapter
// 3, table 3-8).
TEST(UnicodeText, ReplacesMaximalParts) {
  EXPECT_EQ(replace_invalid("a\xF1\x80\x80\xE1\x80\xC2"
                            "b\x80"
                            "c\x80\xBF"
                            "d"),
            "a\uFFFD\uFFFD\uFFFDb\uFFFDc\uFFFD\uFFFDd");
  EXPECT_EQ(replace_invalid("\xF0\x80\x80\x41"), "\uFFFD\uFFFD\uFFFDA");
  EXPECT_EQ(replace_invalid("\xF0\x9F\x91"), "\uFFFD");
}

TEST(UnicodeText, TruncatedMeansThatMoreBytesCouldComplete) {
  EXPECT_TRUE(decode("\xF0\x9F").truncated);
  EXPECT_FALSE(decode("\xF0\x80").truncated);
  EXPECT_FALSE(decode("\xFF").truncated);
}

TEST(UnicodeText, NfcComposesAndReorders) {
  EXPECT_EQ(nfc("plain"), "plain");
  EXPECT_EQ(nfc("e\u0301"), "\u00E9");
  EXPECT_EQ(nfc("a\u0345\u0334"), "a\u0334\u0345");
  EXPECT_EQ(nfc("\u1112\u1161\u11AB"), "\uD55C");
  EXPECT_EQ(nfc("\u212B"), "\u00C5");
}

// U+07FD came with Unicode 11. It is placed below the letter, so an accent above composes with the letter
// across it. For the NFC of `tokenizers` (Unicode 9) it is a starter, so the letter and the accent do not
// compose.
TEST(UnicodeText, NfcLeavesNewerMarksAlone) {
  EXPECT_EQ(nfc("e\u07FD\u0301"), "e\u07FD\u0301");
  EXPECT_EQ(nfc("e\u0301\u07FDe\u0301"), "\u00E9\u07FD\u00E9");
}

TEST(UnicodeText, StandInsKeepTheLength) {
  EXPECT_EQ(with_stand_ins("añ€👍字"), "");
  for (const StandIn& entry : kStandIns) {
    std::string text = "x", expected = "x";
    append(text, entry.last);
    append(expected, entry.code_point);
    ASSERT_EQ(with_stand_ins(text), expected);
    ASSERT_EQ(text.size(), expected.size());
  }
}

TEST(UnicodeText, TablesAreSorted) {
  for (size_t i = 1; i < kStandIns.size(); ++i) ASSERT_LT(kStandIns[i - 1].last, kStandIns[i].first);
  for (size_t i = 1; i < kInertInNfc.size(); ++i) ASSERT_LT(kInertInNfc[i - 1].last, kInertInNfc[i].first);
}

}  // namespace
}  // namespace bough::unicode

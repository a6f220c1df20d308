#include "base/format.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"

namespace bough {
namespace {

TEST(Format, Bytes) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(512), "512 B");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(40.0 * (1 << 30)), "40 GiB");
}

TEST(Format, Durations) {
  EXPECT_EQ(format_duration(85e-6), "85 µs");
  EXPECT_EQ(format_duration(0.0123), "12.3 ms");
  EXPECT_EQ(format_duration(3.2), "3.2 s");
  EXPECT_EQ(format_duration(59.97), "1:00");
  EXPECT_EQ(format_duration(247), "4:07");
  EXPECT_EQ(format_duration(3729), "1:02:09");
  EXPECT_EQ(format_duration(2 * 86400 + 3 * 3600 + 900), "2 d 03:15");
  EXPECT_EQ(format_duration(INFINITY), "unknown");
  EXPECT_EQ(format_duration(1e300), "for ever");
}

TEST(Format, Counts) {
  EXPECT_EQ(format_count(987), "987");
  EXPECT_EQ(format_count(999.7), "1k");
  EXPECT_EQ(format_count(12345), "12.3k");
  EXPECT_EQ(format_count(4.1e6), "4.1M");
  EXPECT_EQ(format_thousands(-1234567), "-1,234,567");
  EXPECT_EQ(format_thousands(-123), "-123");
  EXPECT_EQ(format_thousands(1000), "1,000");
  EXPECT_EQ(format_significant(0.03125), "0.03125");
}

TEST(Format, ShortestReadsBackExactly) {
  for (const double value : {1e-5, 0.1, 1.0 / 3, 5e-324, 1.7976931348623157e308, -0.0})
    EXPECT_EQ(std::strtod(format_shortest(value).c_str(), nullptr), value);
  EXPECT_EQ(format_shortest(1e-5), "1e-05");
}

TEST(Format, WidthsOfText) {
  EXPECT_EQ(display_width("abc"), 3);
  EXPECT_EQ(display_width("é日本\u0301"), 5);
  EXPECT_EQ(display_width("\xff\xfe"), 2);
  EXPECT_EQ(fit("abcdef", 6), "abcdef");
  EXPECT_EQ(fit("abcdef", 4), "abc…");
  EXPECT_EQ(fit("日本語", 5), "日本…");
  EXPECT_EQ(fit("abc", 0), "");
}

TEST(Error, QuotesShortAndEscaped) {
  std::string text = "a\nb\xff\x01é";
  EXPECT_EQ(quoted(text), "'a\\nb\\xff\\x01é'");
  EXPECT_EQ(quoted(std::string(200, 'x'), 5), "'xxxxx…'");
}

TEST(Error, NearestNameOrNone) {
  const char* const names[] = {"schedule", "lr", "weight_decay"};
  EXPECT_EQ(nearest("shedule", names, names + 3), "schedule");
  EXPECT_EQ(nearest("weightdecay", names, names + 3), "weight_decay");
  EXPECT_EQ(nearest("temperature", names, names + 3), "");
}

TEST(Error, ChecksThrowWithValues) {
  const int a = 1;
  try {
    BOUGH_CHECK(a == 2, "a=", a);
    FAIL();
  } catch (const InternalError& error) {
    EXPECT_NE(std::string(error.what()).find("a == 2 does not hold (a=1) at"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace bough

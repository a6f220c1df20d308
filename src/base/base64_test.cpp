#include "base/base64.h"

#include <gtest/gtest.h>

namespace bough {
namespace {

// The test vectors of RFC 4648, section 10.
TEST(Base64, DecodesTheVectorsOfItsStandard) {
  EXPECT_EQ(base64_decode(""), "");
  EXPECT_EQ(base64_decode("Zg=="), "f");
  EXPECT_EQ(base64_decode("Zm8="), "fo");
  EXPECT_EQ(base64_decode("Zm9v"), "foo");
  EXPECT_EQ(base64_decode("Zm9vYmFy"), "foobar");
  EXPECT_EQ(base64_decode("/+8A"), std::string("\xff\xef\0", 3));
}

TEST(Base64, OtherTextIsRefused) {
  for (const char* text : {"Zg", "Zg=", "Z===", "Zm9v=", "Zg==Zg==", "Zm9_", "Zm 9", "=Zg="})
    EXPECT_FALSE(base64_decode(text)) << text;
}

}  // namespace
}  // namespace bough

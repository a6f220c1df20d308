#include "tinker/api_keys.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace bough {
namespace {

TEST(ApiKeys, NamesATenantForEachKey) {
  const ApiKeys keys =
      ApiKeys::parse("# keys\ntml-first\n\n anna  tml-a1\r\nanna tml-a2\nbo.b_1 tml-b\n", "f");
  EXPECT_EQ(keys.tenant("tml-first"), "");
  EXPECT_EQ(keys.tenant("tml-a1"), "anna");
  EXPECT_EQ(keys.tenant("tml-a2"), "anna");
  EXPECT_EQ(keys.tenant("tml-b"), "bo.b_1");
  for (const std::string key : {"", "tml-", "tml-a", "tml-a11", "anna", "tml-a1 "})
    EXPECT_EQ(keys.tenant(key), std::nullopt) << key;
  EXPECT_TRUE(ApiKeys().empty());
  EXPECT_EQ(ApiKeys().tenant(""), std::nullopt);
}

TEST(ApiKeys, RefusesLinesThatAreNoKeys) {
  for (const std::string text :
       {"", "# none\n", "secret\n", "anna secret\n", "tml-a\ntml-b\n", "anna tml-a\nbob tml-a\n",
        "an/na tml-a\n", "../x tml-a\n", "anna tml-a more\n", "tml-a anna\n"})
    EXPECT_THROW(ApiKeys::parse(text, "file"), UserError) << text;
}

}  // namespace
}  // namespace bough

#include "base/json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"

namespace bough {
namespace {

std::string json_error(std::string_view text, int64_t first_line = 1) {
  try {
    parse_json(text, "f.json", first_line);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Json, ReadsWhatNlohmannReads) {
  for (const char* text : {R"({"a": [1, -2, 3.5, "x", null, true, {"b": {}}, []], "c": {"d": [[1]]}})", "[]",
                           "3", "\"\\u00e9\"", " {} \n", "18446744073709551615"})
    EXPECT_EQ(parse_json(text, "f"), Json::parse(text)) << text;
}

TEST(Json, ErrorsSayWhere) {
  EXPECT_EQ(json_error("{\"a\": 1,\n \"b\": }").substr(0, 29), "f.json:2:7: not valid JSON: s");
  EXPECT_EQ(json_error("[1, x]", 17).substr(0, 10), "f.json:17:");
  EXPECT_EQ(json_error("{\"a\": 1, \"a\": 2}", 5),
            "f.json:5: not valid JSON: key 'a' is given twice in one object");
  EXPECT_EQ(json_error(""), "f.json:1: the text is empty, expected a JSON value");
}

TEST(Json, RefusesWhatIsNotJson) {
  const std::string deep(100'000, '[');
  for (const std::string& text :
       {std::string("NaN"), std::string("[1e999]"), std::string("{\"a\":1} x"), std::string("\"\xff\""),
        std::string("[1,]"), std::string("{\"a\""), deep, std::string("\0", 1)})
    EXPECT_NE(json_error(text), "no error") << text.substr(0, 20);
  EXPECT_NE(json_error(std::string(kMaxJsonDepth, '[') + std::string(kMaxJsonDepth, ']')).find("no error"),
            std::string::npos);
  // The message quotes only a little of the input.
  EXPECT_LT(json_error("\"" + std::string(100'000, 'a') + "\n").size(), 400u);
}

TEST(Json, OrderedJsonIsStrict) {
  EXPECT_EQ(parse_ordered_json(R"({"b": [1, {"z": null, "a": true}], "a": "x"})", "x").dump(),
            R"({"b":[1,{"z":null,"a":true}],"a":"x"})");
  std::string deep(1000, '[');
  for (const std::string text :
       {R"({"a": 1, "a": 2})", R"([12345678901234567890123])", R"([1)", R"()", R"([1e999])"})
    EXPECT_THROW(parse_ordered_json(text, "x"), UserError) << text;
  EXPECT_THROW(parse_ordered_json(deep, "x"), UserError);
  EXPECT_EQ(parse_ordered_json("[1e30]", "x")[0], 1e30);
}

TEST(Json, LinesCountFromOneAndSkipBlankOnes) {
  std::vector<std::pair<int64_t, Json>> got;
  for_each_json_line("1\r\n\n  \n[2]\n3", "f",
                     [&](Json value, int64_t line) { got.emplace_back(line, value); });
  EXPECT_EQ(got, (std::vector<std::pair<int64_t, Json>>{{1, 1}, {4, {2}}, {5, 3}}));
  try {
    for_each_json_line("1\n{\n", "f.jsonl", [](Json, int64_t) {});
    FAIL();
  } catch (const UserError& error) {
    EXPECT_EQ(std::string(error.what()).substr(0, 10), "f.jsonl:2:");
  }
}

TEST(Json, DumpsAnyContentAsOneLine) {
  const Json value = {
      {"a", "x\ny"}, {"b", std::numeric_limits<double>::quiet_NaN()}, {"c", "\xff"}, {"d", 1e-5}};
  EXPECT_EQ(dump_line(value), "{\"a\":\"x\\ny\",\"b\":null,\"c\":\"\uFFFD\",\"d\":1e-05}");
  EXPECT_EQ(dump_pretty(Json{{"a", 1}}), "{\n  \"a\": 1\n}\n");
}

}  // namespace
}  // namespace bough

#include "text/message.h"

#include <gtest/gtest.h>

namespace bough {
namespace {

std::string form_of(const std::string& message) {
  try {
    return dump_ordered(template_messages(OrderedJson::parse("[" + message + "]")).at(0));
  } catch (const MessageError& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with(error.field));
    return error.what();
  }
}

TEST(Message, FormsThatMeanTheSameBecomeOne) {
  const std::string call = R"("tool_calls":[{"id":"c","type":"function","function":)"
                           R"({"name":"get","arguments":{"z":1,"a":2}}}]})";
  EXPECT_EQ(form_of(R"({"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function",
      "function": {"name": "get", "arguments": {"z": 1, "a": 2}}}]})"),
            R"({"role":"assistant","content":"",)" + call);
  EXPECT_EQ(form_of(R"({"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function",
      "function": {"name": "get", "arguments": "{\"z\": 1, \"a\": 2}"}}], "audio": null, "refusal": null})"),
            R"({"role":"assistant","content":null,)" + call);
  EXPECT_EQ(form_of(R"({"role": "assistant", "tool_calls": [{"id": "c", "name": "get", "arguments":
      {"z": 1, "a": 2}}]})"),
            R"({"role":"assistant",)" + call);
  EXPECT_EQ(form_of(R"({"role": "assistant", "content": "hi", "tool_calls": null, "name": null})"),
            R"({"role":"assistant","content":"hi"})");
  EXPECT_EQ(form_of(R"({"role": "assistant", "content": "hi", "tool_calls": []})"),
            R"({"role":"assistant","content":"hi"})");
  EXPECT_EQ(form_of(R"({"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "input_text",
      "text": "b"}], "weight": 2})"),
            R"({"role":"system","content":"a\nb","weight":2})");
  EXPECT_EQ(form_of(R"({"role": "assistant", "content": null, "refusal": "no"})"),
            R"({"role":"assistant","content":"no"})");
}

TEST(Message, AWrongFormIsRefusedByItsField) {
  EXPECT_EQ(form_of("3"), "messages[0]: got number '3', expected an object with role and content");
  EXPECT_EQ(form_of(R"({"content": "x"})"),
            "messages[0].role is missing; the message has 'content', expected role and content");
  EXPECT_EQ(form_of(R"({"role": "tool", "content": null})"),
            "messages[0].content: got null, expected a text or a list of parts");
  EXPECT_EQ(form_of(R"({"role": "user"})"), "messages[0].content is missing");
  EXPECT_EQ(form_of(R"({"role": "user", "content": 3})"),
            "messages[0].content: got number '3', expected a text or a list of parts");
  EXPECT_EQ(form_of(R"({"role": "assistant", "content": "", "tool_calls": [{"function": {}}]})"),
            "messages[0].tool_calls[0].function.name: got nothing, expected a text");
  EXPECT_EQ(
      form_of(R"({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": [1]}]})"),
      "messages[0].tool_calls[0].function.arguments: got array '[1]', expected a JSON object, or one as a "
      "text");
  EXPECT_TRUE(
      form_of(R"({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{"}]})")
          .starts_with("messages[0].tool_calls[0].function.arguments:1:"));
  EXPECT_EQ(form_of(R"({"role": "assistant", "content": "", "reasoning_content": 1})"),
            "messages[0].reasoning_content: got number '1', expected a text");
}

TEST(Message, ToolsMayBeAJsonText) {
  const OrderedJson tools = OrderedJson::parse(R"([{"type": "function", "function": {"name": "f"}}])");
  EXPECT_EQ(template_tools(tools), tools);
  EXPECT_EQ(template_tools(tools.dump()), tools);
  EXPECT_TRUE(template_tools(OrderedJson::array()).is_null());
  EXPECT_TRUE(template_tools(nullptr).is_null());
  EXPECT_THROW(template_tools(OrderedJson::object()), MessageError);
  EXPECT_THROW(template_tools(OrderedJson::array({OrderedJson::object()})), MessageError);
}

}  // namespace
}  // namespace bough

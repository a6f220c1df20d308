#include "text/assistant_form.h"

#include <gtest/gtest.h>

#include "text/chat_template.h"

namespace bough {
namespace {

// A template that writes an assistant's message as `jinja`, with the variable `m`.
ChatTemplate template_of(const std::string& jinja) {
  return ChatTemplate::from_text("{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}" +
                                     jinja + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
                                 "test");
}

constexpr const char* kCalls =
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}";

// The text of an assistant's message in the form that the template reads.
std::string shown(const ChatTemplate& chat_template, const std::string& message) {
  Conversation conversation;
  conversation.messages.push_back(parse_ordered_json(message, "message"));
  apply(chat_template.assistant_form(), conversation.messages);
  return chat_template.render(conversation).substr(std::string("<assistant>").size());
}

TEST(AssistantForm, ContentThatIsMissing) {
  const std::string call = R"({"type": "function", "function": {"name": "f", "arguments": {"a": 1}}})";
  // Templates that write the word None or null, that cannot add null to a text, and that need null.
  for (const char* jinja :
       {"{{ m.content }}", "{{ m.content | tojson if m.content is not string else m.content }}",
        "{{ '' + m.content }}", "{{ m.content or '' }}", "{{ m.content if m.content }}"}) {
    const ChatTemplate chat_template = template_of(jinja + std::string(kCalls));
    EXPECT_TRUE(chat_template.assistant_form().shows_calls);
    for (const char* content : {R"("content": null, )", R"("content": "", )", ""})
      EXPECT_EQ(
          shown(chat_template, str(R"({"role": "assistant", )", content, R"("tool_calls": [)", call, "]}")),
          R"([f{"a": 1}])")
          << jinja << " " << content;
    for (const char* calls : {"", R"(, "tool_calls": null)", R"(, "tool_calls": [])"})
      for (const char* content : {R"(, "content": null)", R"(, "content": "")", ""})
        EXPECT_EQ(shown(chat_template, str(R"({"role": "assistant")", content, calls, "}")), "") << jinja;
  }
  const ChatTemplate needs_null =
      template_of(str("{% if m.content is none %}", kCalls, "{% else %}{{ m.content }}{% endif %}"));
  EXPECT_TRUE(needs_null.assistant_form().null_content);
  EXPECT_EQ(shown(needs_null, str(R"({"role": "assistant", "content": "", "tool_calls": [)", call, "]}")),
            R"([f{"a": 1}])");
  EXPECT_EQ(shown(needs_null, str(R"({"role": "assistant", "content": "so", "tool_calls": [)", call, "]}")),
            R"(so<assistant>[f{"a": 1}])");
}

TEST(AssistantForm, ArgumentsAsTextOrAsAnObject) {
  const std::string message =
      R"({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é"}}}]})";
  for (const char* arguments :
       {"c.function.arguments + ''", "c.function.arguments", "c.function.arguments | tojson"}) {
    const ChatTemplate chat_template =
        template_of(str("{% for c in m.tool_calls %}{{ ", arguments, " }}{% endfor %}"));
    EXPECT_EQ(shown(chat_template, message), R"({"a": "é"})") << arguments;
  }
  EXPECT_FALSE(template_of("{{ m.content }}").assistant_form().shows_calls);
}

TEST(AssistantForm, NamesOfReasoning) {
  const std::string message = R"({"role": "assistant", "content": "a", "reasoning_content": "why"})";
  EXPECT_EQ(shown(template_of("{{ m.thinking }}{{ m.content }}"), message), "whya");
  EXPECT_EQ(shown(template_of("{{ m.reasoning_content }}{{ m.content }}"), message), "whya");
}

}  // namespace
}  // namespace bough

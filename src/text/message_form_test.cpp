#include "text/message_form.h"

#include <gtest/gtest.h>

#include "text/chat_template.h"
#include "text/message.h"

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
  apply(chat_template.message_form(), conversation.messages);
  return chat_template.render(conversation).substr(std::string("<assistant>").size());
}

TEST(MessageForm, ContentThatIsMissing) {
  const std::string call = R"({"type": "function", "function": {"name": "f", "arguments": {"a": 1}}})";
  // Templates that write the word None or null, that cannot add null to a text, and that need null.
  for (const char* jinja :
       {"{{ m.content }}", "{{ m.content | tojson if m.content is not string else m.content }}",
        "{{ '' + m.content }}", "{{ m.content or '' }}", "{{ m.content if m.content }}"}) {
    const ChatTemplate chat_template = template_of(jinja + std::string(kCalls));
    EXPECT_TRUE(chat_template.message_form().shows_calls);
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
  EXPECT_TRUE(needs_null.message_form().null_content);
  EXPECT_EQ(shown(needs_null, str(R"({"role": "assistant", "content": "", "tool_calls": [)", call, "]}")),
            R"([f{"a": 1}])");
  EXPECT_EQ(shown(needs_null, str(R"({"role": "assistant", "content": "so", "tool_calls": [)", call, "]}")),
            R"(so<assistant>[f{"a": 1}])");
}

TEST(MessageForm, ArgumentsAsTextOrAsAnObject) {
  const std::string message =
      R"({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é"}}}]})";
  for (const char* arguments :
       {"c.function.arguments + ''", "c.function.arguments", "c.function.arguments | tojson"}) {
    const ChatTemplate chat_template =
        template_of(str("{% for c in m.tool_calls %}{{ ", arguments, " }}{% endfor %}"));
    EXPECT_EQ(shown(chat_template, message), R"({"a": "é"})") << arguments;
  }
  EXPECT_FALSE(template_of("{{ m.content }}").message_form().shows_calls);
}

// Templates of models that see images.
TEST(MessageForm, ContentAsAListOfParts) {
  const auto rendered = [](const std::string& content) {
    const ChatTemplate chat_template =
        ChatTemplate::from_text("{% for m in messages %}<{{ m.role }}>" + content + "{% endfor %}", "test");
    Conversation conversation;
    conversation.messages = {message_of("system", "s"), message_of("user", "u"), message_of("assistant", "")};
    conversation.messages[2]["content"] = nullptr;
    apply(chat_template.message_form(), conversation.messages);
    EXPECT_EQ(text_after_content(chat_template, conversation), "");
    return chat_template.render(conversation);
  };
  const std::string all = "<system>s<user>u<assistant>";
  EXPECT_EQ(rendered("{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"), all);
  EXPECT_EQ(rendered("{{ m.content[0]['text'] + '' }}"), all);
  EXPECT_EQ(rendered("{{ m.content }}"), all) << "a text where the template shows it";
  EXPECT_EQ(rendered("{{ m.content if m.content is string else m.content[0].text }}"), all);
}

TEST(MessageForm, NamesOfReasoning) {
  const std::string message = R"({"role": "assistant", "content": "a", "reasoning_content": "why"})";
  EXPECT_EQ(shown(template_of("{{ m.thinking }}{{ m.content }}"), message), "whya");
  EXPECT_EQ(shown(template_of("{{ m.reasoning_content }}{{ m.content }}"), message), "whya");
}

}  // namespace
}  // namespace bough

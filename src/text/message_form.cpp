#include "text/message_form.h"

#include <algorithm>
#include <string_view>

#include "base/ascii.h"
#include "base/error.h"
#include "text/chat_template.h"

namespace bough {

namespace {

constexpr const char* kCallName = "probe_name";
constexpr const char* kToolName = "other_name";
constexpr const char* kProbeText = "ProbeText";

OrderedJson probe_tool() {
  return OrderedJson::parse(
      R"([{"type": "function", "function": {"name": "other_name", "description": "Other",
    "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "Key"}}}}}])");
}

// A question, an assistant's message and the result of its call.
OrderedJson called(const char* argument, const char* content = "") {
  OrderedJson messages = OrderedJson::parse(R"([{"role": "user", "content": "Question"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c00000000", "type": "function",
      "function": {"name": "", "arguments": {"key": ""}}}]},
    {"role": "tool", "tool_call_id": "c00000000", "name": "", "content": "Result"}])");
  OrderedJson& function = messages[1]["tool_calls"][0]["function"];
  function["name"] = messages[2]["name"] = kCallName;
  function["arguments"]["key"] = argument;
  messages[1]["content"] = content;
  return messages;
}

bool has(const std::optional<std::string>& text, std::string_view part) {
  return text && text->find(part) != std::string::npos;
}

// Some templates refuse a tool's result or a message after a call. Then the call is the last message.
std::optional<std::string> rendered(const ChatTemplate& chat_template, const MessageForm& form,
                                    OrderedJson messages, const OrderedJson& tools, size_t at_least = 2) {
  apply(form, messages);
  for (; messages.size() >= at_least; messages.erase(messages.end() - 1)) {
    Conversation conversation;
    conversation.messages = messages;
    conversation.tools = tools;
    try {
      return chat_template.render(conversation);
    } catch (const UserError&) {
    }
  }
  return std::nullopt;
}

// Whether a template writes null content as a word: the text equals that of empty content except for it.
bool writes_null(std::string_view with_null, std::string_view with_empty) {
  const size_t common = std::min(with_null.size(), with_empty.size());
  size_t begin = 0, end = 0;
  while (begin < common && with_null[begin] == with_empty[begin]) ++begin;
  while (end < common - begin && with_null.rbegin()[end] == with_empty.rbegin()[end]) ++end;
  const std::string_view word = trimmed(with_null.substr(begin, with_null.size() - begin - end), kSpaces);
  const std::string_view rest = trimmed(with_empty.substr(begin, with_empty.size() - begin - end), kSpaces);
  return rest.empty() && (word.find("None") != word.npos || word.find("null") != word.npos);
}

bool needs_part_lists(const ChatTemplate& chat_template) {
  const OrderedJson messages = {{{"role", "user"}, {"content", "AskedText"}},
                                {{"role", "assistant"}, {"content", kProbeText}}};
  const auto shows = [&](bool part_lists) {
    const auto text = rendered(chat_template, {.part_lists = part_lists}, messages, {});
    return has(text, "AskedText") && has(text, kProbeText);
  };
  return !shows(false) && shows(true);
}

void find_call_form(const ChatTemplate& chat_template, const OrderedJson& tools, MessageForm& found) {
  found.shows_calls = found.null_content = found.text_arguments = found.calls_alone = false;
  for (const bool text_arguments : {false, true}) {
    const auto text = [&](bool null_content) {
      const MessageForm form{
          .part_lists = found.part_lists, .null_content = null_content, .text_arguments = text_arguments};
      return rendered(chat_template, form, called(kProbeText), tools);
    };
    const auto with_null = text(true), with_empty = text(false);
    const bool null_shows = has(with_null, kProbeText), empty_shows = has(with_empty, kProbeText);
    if (!null_shows && !empty_shows) continue;
    const bool null_content = null_shows && !(empty_shows && writes_null(*with_null, *with_empty));
    const auto& best = null_content ? with_null : with_empty;
    if (text_arguments && found.shows_calls && !has(best, R"({"key": "ProbeText"})")) return;
    found.shows_calls = true;
    found.null_content = null_content;
    found.text_arguments = text_arguments;
    found.calls_alone = false;
    found.calls_alone = !has(rendered(chat_template, found, called(kProbeText, "Said"), tools), kProbeText);
    // A template that writes an object as Python does expects JSON text.
    if (!has(best, "{'key': 'ProbeText'}")) return;
  }
}

// Moves texts beside calls into messages of their own.
void split_calls(OrderedJson& messages) {
  OrderedJson split = OrderedJson::array();
  for (OrderedJson& message : messages) {
    if (message.value("role", OrderedJson()) == "assistant" && message.contains("tool_calls") &&
        !message["tool_calls"].empty() && !message["content"].is_null() && message["content"] != "") {
      OrderedJson text = message;
      text.erase("tool_calls");
      split.push_back(std::move(text));
      message["content"] = nullptr;
      message.erase("reasoning_content");
    }
    split.push_back(std::move(message));
  }
  messages = std::move(split);
}

bool shows_reasoning(const ChatTemplate& chat_template, const MessageForm& form, const OrderedJson& tools) {
  OrderedJson answered = OrderedJson::parse(R"([{"role": "user", "content": "Question"},
    {"role": "assistant", "content": "Answer"}])");
  OrderedJson after_call = called("value");
  for (OrderedJson* messages : {&answered, &after_call}) {
    (*messages)[1]["reasoning_content"] = kProbeText;
    if (has(rendered(chat_template, form, *messages, tools), kProbeText)) return true;
  }
  return false;
}

bool shows_tools(const ChatTemplate& chat_template, const MessageForm& form) {
  const OrderedJson messages = {{{"role", "user"}, {"content", "Question"}}};
  return has(rendered(chat_template, form, messages, probe_tool(), 1), kToolName);
}

}  // namespace

MessageForm find_message_form(const ChatTemplate& chat_template) {
  MessageForm form{.part_lists = needs_part_lists(chat_template)};
  form.shows_tools = shows_tools(chat_template, form);
  OrderedJson tools;
  find_call_form(chat_template, tools, form);
  if (!form.shows_calls) {
    tools = probe_tool();
    find_call_form(chat_template, tools, form);
  }
  MessageForm thinking = form;
  thinking.is_thinking = true;
  if (!shows_reasoning(chat_template, form, tools) && shows_reasoning(chat_template, thinking, tools))
    return thinking;
  return form;
}

std::optional<std::string> text_after_content(const ChatTemplate& chat_template, Conversation conversation) {
  constexpr std::string_view kContent = "ContentOfTheLastMessage";
  conversation.messages.back().erase("tool_calls");
  conversation.messages.back()["content"] = kContent;
  apply(chat_template.message_form(), conversation.messages);
  const std::string text = chat_template.render(conversation);
  const size_t content = text.rfind(kContent);
  if (content == std::string::npos) return std::nullopt;
  return text.substr(content + kContent.size());
}

namespace {

void apply_to_assistant(const MessageForm& form, OrderedJson& message) {
  const auto absent = [&](const char* key) { return !message.contains(key) || message[key].is_null(); };
  if (absent("tool_calls") || message["tool_calls"].empty()) {
    message.erase("tool_calls");
    if (absent("content")) message["content"] = "";
  } else {
    if (absent("content") || message["content"] == "")
      message["content"] = form.null_content ? OrderedJson() : OrderedJson("");
    if (form.text_arguments)
      for (OrderedJson& call : message["tool_calls"]) {
        OrderedJson& arguments = call["function"]["arguments"];
        arguments = jinja::to_json(jinja::Value::from_json(arguments), {});
      }
  }
  if (form.is_thinking && !absent("reasoning_content") && absent("thinking")) {
    message["thinking"] = message["reasoning_content"];
    message.erase("reasoning_content");
  }
}

}  // namespace

void apply(const MessageForm& form, OrderedJson& messages) {
  if (form.calls_alone) split_calls(messages);
  for (OrderedJson& message : messages) {
    if (message.value("role", OrderedJson()) == "assistant") apply_to_assistant(form, message);
    if (const auto content = message.find("content");
        form.part_lists && content != message.end() && content->is_string())
      *content = OrderedJson::array({{{"type", "text"}, {"text", OrderedJson(*content)}}});
  }
}

}  // namespace bough

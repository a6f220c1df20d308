// Converts conversations to text with the chat template of a model directory.
//
// The Jinja interpreter of chat_template_jinja.h runs the template unchanged. So the text equals that of
// transformers' apply_chat_template, also with tools, tool calls and reasoning. The template decides which
// conversations are valid. If it refuses a conversation, the UserError has the template's own message.
//
// Encode the text with add_special_tokens = false, as apply_chat_template does. Then bos_token occurs only if
// the chat template writes it.
#pragma once

#include <ctime>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "text/chat_template_value.h"
#include "text/message_form.h"

namespace bough {

// The input of a template. Messages have the format of OpenAI's chat API and transformers: role, content (a
// text, null, or a list of parts), tool_calls, reasoning_content, ... Objects keep the order of their keys,
// because templates show tools to the model in this order.
struct Conversation {
  OrderedJson messages = OrderedJson::array();
  OrderedJson tools;                              // null, or an array of JSON schemas of functions
  OrderedJson documents;                          // null, or an array
  OrderedJson variables = OrderedJson::object();  // what a template may read, such as enable_thinking
  bool add_generation_prompt = false;             // true: the text ends where the assistant's answer begins
  std::optional<std::time_t> now;                 // the time that the template sees; empty: the clock's
};

class ChatTemplate {
 public:
  // Plain ChatML.
  ChatTemplate();
  // Reads chat_template.jinja, or, if this file is missing, the `chat_template` of tokenizer_config.json. If
  // there is a template named tool_use, conversations with tools use it. Throws UserError if the directory
  // has no template, or the interpreter does not support the template.
  static ChatTemplate from_directory(const std::filesystem::path& directory);
  // Makes a template from its text. Error messages call the template `name`. `variables`: Jinja variables for
  // every conversation, such as bos_token.
  static ChatTemplate from_text(std::string_view jinja, const std::string& name,
                                OrderedJson variables = OrderedJson::object());

  // Throws UserError if the template refuses the conversation or executes an unsupported construct. The
  // message names the construct and its line in the template.
  std::string render(const Conversation& conversation) const;

  // The format of tool calls whose markers the template (for tools) has; empty: none that is known.
  std::string tool_call_parser() const;

  // Found at the first call. Any thread.
  const MessageForm& message_form() const;

 private:
  struct Program;
  struct Form;
  ChatTemplate(std::shared_ptr<const Program> program, std::shared_ptr<const Program> with_tools);

  std::shared_ptr<const Program> program_;  // immutable, shared by copies and threads
  std::shared_ptr<const Program> with_tools_;
  std::shared_ptr<Form> form_;
};

// The Jinja source of plain ChatML, which `bough init` writes.
std::string_view chatml_template();

}  // namespace bough

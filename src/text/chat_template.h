// Conversations to text, by the template of a model directory.
//
// The template is run as it is written, by the Jinja interpreter of chat_template_jinja.h, so that the text
// equals that of transformers' apply_chat_template: any format, every role, tools, tool calls, reasoning. The
// template decides what a conversation may be; what it refuses is a UserError with its own words.
//
// The text is whole: it is encoded without the tokenizer's own template, as apply_chat_template does, so that
// a bos_token is there once if the chat template writes it, and else not at all.
#pragma once

#include <ctime>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/json.h"
#include "text/chat_template_value.h"
#include "text/message.h"

namespace bough {

// What a template is given. Messages are objects as OpenAI's chat API and transformers have them: role,
// content (a text, null, or a list of parts), tool_calls, reasoning_content, ... Objects keep the order of
// their keys, since templates show tools to the model as they come.
struct Conversation {
  OrderedJson messages = OrderedJson::array();
  OrderedJson tools;                              // null, or an array of JSON schemas of functions
  OrderedJson documents;                          // null, or an array
  OrderedJson variables = OrderedJson::object();  // the template's own settings, such as enable_thinking
  bool add_generation_prompt = false;             // ends where the assistant's answer begins
  std::optional<std::time_t> now;                 // what templates that write the date see; empty: the clock
};

// Parses JSON whose objects keep the order of their keys. UserError as parse_json's (base/json.h), and where
// a whole number has more than 64 bits, which a template would show otherwise than it is written.
OrderedJson parse_ordered_json(std::string_view text, const std::string& source);

class ChatTemplate {
 public:
  // Plain ChatML.
  ChatTemplate();
  // Reads chat_template.jinja, or else the `chat_template` of tokenizer_config.json; and the template named
  // tool_use for conversations with tools, where there is one. UserError if the directory has none, or it is
  // written in what the interpreter lacks.
  static ChatTemplate from_directory(const std::filesystem::path& directory);
  // Makes a template from its text. `name` is what error messages call it, `variables` what every
  // conversation has, such as bos_token.
  static ChatTemplate from_text(std::string_view jinja, const std::string& name,
                                OrderedJson variables = OrderedJson::object());

  // UserError if the template refuses the conversation or reaches what the interpreter lacks: it names the
  // construct and its line.
  std::string render(const Conversation& conversation) const;
  std::string render(std::span<const Message> messages, bool add_generation_prompt) const;

 private:
  struct Program;
  ChatTemplate(std::shared_ptr<const Program> program, std::shared_ptr<const Program> with_tools)
      : program_(std::move(program)), with_tools_(std::move(with_tools)) {}

  std::shared_ptr<const Program> program_;  // immutable: copies share it, threads may too
  std::shared_ptr<const Program> with_tools_;
};

// The Jinja source of plain ChatML, as `bough init` writes it.
std::string_view chatml_template();

}  // namespace bough

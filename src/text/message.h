// Messages and tools in the form that chat templates expect, from the forms that clients, data sets and
// environments use.
//
// A message is a JSON object in the format of OpenAI's chat API and transformers: role, content, and any of
// reasoning_content, tool_calls, tool_call_id, name, ... Every field reaches the chat template. Objects keep
// the order of their keys, because templates show tools and calls to the model in this order.
#pragma once

#include <string>

#include "base/error.h"
#include "base/json.h"

namespace bough {

// A message or a tool has a wrong form. `field` is the field's path: messages[1].content.
struct MessageError : UserError {
  MessageError(const std::string& field_, const std::string& what)
      : UserError(field_ + what), field(field_) {}
  std::string field;
};

OrderedJson message_of(const std::string& role, const std::string& content);

// Returns the text of a message's content: a text, null (an empty text), or a list of text parts, which are
// joined by `separator`, as vLLM joins them. Throws MessageError; `field` names the content.
std::string text_of_content(const OrderedJson& content, const std::string& field,
                            const char* separator = "\n");

// Parses a call's arguments, because chat templates expect an object. Empty text: an empty object. Throws
// MessageError.
OrderedJson parse_arguments(const std::string& arguments, const std::string& field);

// Returns the messages in one form; `field` names the list in errors. Content becomes a text, a call's
// arguments an object, a call without `function` gets one, an instruction of the role `developer` the role
// `system`, a refusal the content, and `reasoning` the name `reasoning_content`. A field that is null, and an
// empty list of calls, is left out; the content of an assistant's message may be null or missing (apply() in
// text/message_form.h fills it in). Other fields stay as they are. Throws MessageError.
OrderedJson template_messages(const OrderedJson& messages, const std::string& field = "messages");

// Returns the tools for a chat template: a list of JSON schemas of functions, or null if there are none. The
// list may be given as a JSON text. Throws MessageError.
OrderedJson template_tools(const OrderedJson& tools, const std::string& field = "tools");

}  // namespace bough

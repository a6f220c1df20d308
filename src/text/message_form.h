// How a chat template reads messages.
//
// Templates disagree: text may have to be a list of parts, content beside calls may have to be null (a
// template may skip the calls otherwise) or a text (a template may write the word None otherwise), arguments
// may have to be an object or JSON text, and reasoning has two names. Rendering a few short conversations
// shows what a template reads.
#pragma once

#include <optional>
#include <string>

#include "text/chat_template_value.h"

namespace bough {

class ChatTemplate;
struct Conversation;

struct MessageForm {
  bool part_lists = false;  // a text is shown only as a list of one part: {"type": "text", "text": ...}
  bool shows_tools = false;
  bool shows_calls = false;     // false: the template writes a call in none of the forms
  bool null_content = true;     // absent content beside calls: null, or else an empty text
  bool text_arguments = false;  // a call's arguments: JSON text, or else an object
  bool calls_alone = false;     // the template skips calls beside a text: the text becomes a message before
  bool is_thinking = false;     // reasoning is read from `thinking`, or else from `reasoning_content`
};

MessageForm find_message_form(const ChatTemplate& chat_template);

// Puts messages into the form that a template reads. Null, "" and absent content of the assistant mean the
// same, and so do null, [] and absent tool calls. Content must be a text or null, arguments must be objects.
void apply(const MessageForm& form, OrderedJson& messages);

// Returns the text after the content of the last message, an assistant's, whose calls are removed. nullopt
// if the template does not write the content unchanged. Throws UserError if it refuses the conversation.
std::optional<std::string> text_after_content(const ChatTemplate& chat_template, Conversation conversation);

}  // namespace bough

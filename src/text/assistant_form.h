// How a chat template reads an assistant's message with tool calls or reasoning.
//
// Templates disagree: content beside calls may have to be null (a template may skip the calls otherwise) or a
// text (a template may write the word None otherwise), arguments may have to be an object or JSON text, and
// reasoning has two names. Rendering a few short conversations shows what a template reads.
#pragma once

#include "text/chat_template_value.h"

namespace bough {

class ChatTemplate;

struct AssistantForm {
  bool shows_calls = false;     // false: the template writes a call in none of the forms
  bool null_content = true;     // absent content beside calls: null, or else an empty text
  bool text_arguments = false;  // a call's arguments: JSON text, or else an object
  bool calls_alone = false;     // the template skips calls beside a text: the text becomes a message before
  bool is_thinking = false;     // reasoning is read from `thinking`, or else from `reasoning_content`
};

AssistantForm find_assistant_form(const ChatTemplate& chat_template);

// Puts the assistant's messages into the form that a template reads. Null, "" and absent content mean the
// same, and so do null, [] and absent tool calls. Arguments must be objects.
void apply(const AssistantForm& form, OrderedJson& messages);

}  // namespace bough

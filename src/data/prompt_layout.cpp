#include "data/prompt_layout.h"

#include "base/error.h"

namespace bough {

namespace {
constexpr std::string_view kHole = "{question}";
}

void PromptLayout::check() const {
  if (question_template.find(kHole) == std::string::npos) {
    throw UserError(
        str("question_template: got ", quoted(question_template), ", expected a text with {question} in it"));
  }
}

std::string render_question(std::string_view question, const PromptLayout& layout) {
  const std::string_view pattern = layout.question_template;
  std::string out;
  size_t begin = 0;
  for (size_t hole = pattern.find(kHole); hole != std::string_view::npos; hole = pattern.find(kHole, begin)) {
    out += pattern.substr(begin, hole - begin);
    out += question;
    begin = hole + kHole.size();
  }
  return out += pattern.substr(begin);
}

std::string plain_prompt(std::span<const WorkedExample> examples, std::string_view prompt,
                         const PromptLayout& layout) {
  std::string out;
  for (const WorkedExample& example : examples) {
    out += example.is_prompt ? example.question : render_question(example.question, layout);
    out += layout.answer_prefix;
    out += example.answer;
    out += layout.separator;
  }
  return out += prompt;
}

OrderedJson conversation(std::span<const WorkedExample> examples, std::string_view question,
                         const PromptLayout& layout) {
  OrderedJson messages = OrderedJson::array();
  if (!layout.system.empty()) messages.push_back(message_of("system", layout.system));
  for (const WorkedExample& example : examples) {
    messages.push_back(message_of("user", example.question));
    messages.push_back(message_of("assistant", example.answer));
  }
  messages.push_back(message_of("user", std::string(question)));
  return messages;
}

}  // namespace bough

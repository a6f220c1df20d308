// How a question becomes a prompt: the plain layout, or a conversation, with worked examples in front.
//
//   Q: worked question   |
//   A: its answer        |  the same for every problem of a data set: one long shared prefix
//                        |
//   Q: the question
//   A:
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/settings.h"
#include "data/problems.h"

namespace bough {

struct PromptLayout {
  std::string question_template = "Q: {question}\nA:";
  std::string answer_prefix = " ";
  std::string separator = "\n\n";
  std::string system;

  template <class V>
  void visit(V& v) {
    v("question_template", question_template,
      "what a question becomes in a plain prompt; contains {question}");
    v("answer_prefix", answer_prefix,
      "between a plain prompt and its answer, in worked examples and sft records");
    v("separator", separator, "between a worked example's answer and what follows, in plain prompts");
    v("system", system, "system message of conversations; empty: none");
  }
  void check() const;  // UserError: {question} does not occur
};

struct WorkedExample {
  std::string question;  // what the template takes
  std::string answer;
  bool is_prompt = false;  // `question` is a finished prompt: the template is not applied
};

// Template applied; every occurrence of {question} is replaced, nothing else is special.
std::string render_question(std::string_view question, const PromptLayout& layout);

// Examples and a finished prompt (render_question's result, or the user's own) as one text.
std::string plain_prompt(std::span<const WorkedExample> examples, std::string_view prompt,
                         const PromptLayout& layout);

// The prompt as a conversation: system message, a user and an assistant turn an example, the question. The
// questions stand as they are: the chat template of the model does the rest.
std::vector<Message> conversation(std::span<const WorkedExample> examples, std::string_view question,
                                  const PromptLayout& layout);

}  // namespace bough

// How a question becomes a prompt: plain text (below) or a conversation, with worked examples in front.
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
    v("question_template", question_template, "a question's text in a plain prompt; must contain {question}");
    v("answer_prefix", answer_prefix,
      "text between a plain prompt and its answer, in worked examples and sft records");
    v("separator", separator, "text after a worked example's answer, in plain prompts");
    v("system", system, "system message of conversations; empty: none");
  }
  void check() const;  // throws UserError if the template does not contain {question}
};

struct WorkedExample {
  std::string question;  // inserted into the template
  std::string answer;
  bool is_prompt = false;  // true: `question` is a finished prompt; question_template is not applied
};

// Returns the template with every {question} replaced. No other text in the template is special.
std::string render_question(std::string_view question, const PromptLayout& layout);

// Joins the examples and a finished prompt (from render_question or from the user) into one text.
std::string plain_prompt(std::span<const WorkedExample> examples, std::string_view prompt,
                         const PromptLayout& layout);

// Builds a conversation: the system message, a user and an assistant message per example, then the question.
// question_template is not applied, because the model's chat template formats the messages.
OrderedJson conversation(std::span<const WorkedExample> examples, std::string_view question,
                         const PromptLayout& layout);

}  // namespace bough

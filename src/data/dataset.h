// Reads data sets from the user's JSON Lines: problems for RL, and examples for `bough sft`.
//
// A line needs one of these fields. If it has several, the first in this order is used:
//   messages             [{role, content, ...}, ...]: a conversation; every field reaches the chat template
//   prompt               a finished prompt, used unchanged; or a list of messages
//   question             turned into a prompt by PromptLayout (prompt_layout.h)
// A line also has `answer`, a text or a number (GSM8K's answers end in "#### 42"). If a conversation ends
// with a message of the assistant and the line has no `answer`, this message is the answer. All other fields
// are kept for the user's reward function.
//
// `format` says whether a prompt or question becomes plain text, or a conversation for the model's chat
// template. Lines with `messages` are always conversations. `tools` of a line, a list of function schemas or
// one as a JSON text, go to the chat template with its conversation. A plain prompt with tools is refused
// when it is encoded (PromptEncoder), unless an environment makes a conversation of it.
//
// All errors are UserErrors. Their messages begin with "file:line: ". They name the field, its value and what
// was expected.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/settings.h"
#include "data/problems.h"
#include "data/prompt_layout.h"

namespace bough {

struct FewShotSettings {
  std::string path;
  int64_t shots = 0;

  template <class V>
  void visit(V& v) {
    v("path", path, "JSON Lines file that begins with the worked examples; empty: the data set itself");
    v("shots", shots, "worked examples in front of every question", range(0, 1024));
  }
};

struct DatasetSettings {
  std::string path;
  std::string format = "text";
  int64_t batch_size = 16;
  bool shuffle = true;
  int64_t max_problems = 0;
  std::string overlong_prompts = "error";
  int64_t max_length = 0;
  bool answer_required = true;
  std::string messages_key = "messages";
  std::string tools_key = "tools";
  std::string prompt_key = "prompt";
  std::string question_key = "question";
  std::string answer_key = "answer";
  std::string completion_key = "completion";
  std::string id_key = "id";
  PromptLayout layout;
  FewShotSettings few_shot;

  template <class V>
  void visit(V& v) {
    v("path", path, "JSON Lines file");
    v("format", format, "form of a prompt: plain text, or a conversation for the model's chat template",
      one_of({"text", "chat"}));
    v("batch_size", batch_size, "problems per batch", range(1, 1'000'000));
    v("shuffle", shuffle, "a new random order every epoch; false: the file's order");
    v("max_problems", max_problems, "number of problems to read; 0: all", at_least(0));
    v("overlong_prompts", overlong_prompts,
      "prompts of more than max_length tokens: an error before the run, left out, or, if they are plain "
      "text, "
      "cut at their left",
      aliased({"error", "drop", "truncate_left"}, {{"true", "drop"}, {"false", "error"}}));
    v("max_length", max_length,
      "maximum tokens of a prompt, for sft of an example; 0: as many as the model's context takes",
      at_least(0));
    v("answer_required", answer_required,
      "true: a line without an answer is an error; false: its answer is empty");
    v("messages_key", messages_key, "field of the conversation", not_empty());
    v("tools_key", tools_key, "field of the tools that the chat template shows", not_empty());
    v("prompt_key", prompt_key, "field of a finished prompt, used as it is", not_empty());
    v("question_key", question_key, "field of the question", not_empty());
    v("answer_key", answer_key, "field of the reference answer", not_empty());
    v("completion_key", completion_key, "field of the completion, for sft", not_empty());
    v("id_key", id_key, "field of a problem's id; without it the id is the line's number", not_empty());
    v("layout", layout, "layout of prompts that are made from questions");
    v("few_shot", few_shot, "worked examples");
  }
};

// Reads the problems of a file. A record with the question of a worked example is left out. Throws UserError
// if the file is malformed or if no problem is left.
Dataset read_dataset(const DatasetSettings& settings);

// An example for supervised training. It is either a conversation that ends with a message of the assistant,
// or a prompt and its completion as plain text, which are concatenated unchanged.
struct SftExample {
  OrderedJson messages;  // a list as of template_messages(); empty: plain text
  std::string prompt;
  std::string completion;
  OrderedJson tools;  // a list of function schemas; null: none
  std::string where;  // "file:line"
};

// Reads the examples of a file: `messages`, `prompt` + `completion`, or `prompt`/`question` + `answer`. The
// last message of a conversation is learned with its reasoning and its calls.
// Prompts equal those of read_dataset for the same settings, so SFT and RL train on the same prompts.
// layout.answer_prefix is put before an `answer`, but not before a `completion`.
std::vector<SftExample> read_sft(const DatasetSettings& settings);

}  // namespace bough

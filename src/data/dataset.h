// Data sets from the user's own JSON Lines, for reinforcement learning (problems) and for `bough sft`
// (examples).
//
// What a line may hold; the first of these that it has decides:
//   messages             [{role, content}, ...]: a conversation
//   prompt               a finished prompt, taken as it stands
//   question             becomes a prompt by PromptLayout (prompt.h)
// and with it `answer` (text or a number; GSM8K's end in "#### 42"). If a conversation ends with the
// assistant and the line has no answer, that last message is the answer. Every other field is kept for the
// user's reward function.
//
// `format` says what a prompt or question becomes: plain text, or a conversation for the model's chat
// template. Lines with `messages` are conversations in either case.
//
// Errors are UserErrors that begin with "file:line: " and name the field, what it got and what it expected.
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
    v("path", path, "JSON Lines whose first records are the worked examples; empty: the data set itself");
    v("shots", shots, "worked examples in front of every question", range(0, 1024));
  }
};

struct DatasetSettings {
  std::string path;
  std::string format = "text";
  int64_t batch_size = 16;
  bool shuffle = true;
  int64_t max_problems = 0;
  bool answer_required = true;
  std::string messages_key = "messages";
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
    v("format", format, "what a prompt or question becomes: text, or chat for the model's chat template",
      one_of({"text", "chat"}));
    v("batch_size", batch_size, "problems of a batch", range(1, 1'000'000));
    v("shuffle", shuffle, "a new random order every epoch; false: the file's order");
    v("max_problems", max_problems, "read only so many problems; 0: all", at_least(0));
    v("answer_required", answer_required, "a line without an answer is an error; false: its answer is empty");
    v("messages_key", messages_key, "field of the conversation", not_empty());
    v("prompt_key", prompt_key, "field of the finished prompt", not_empty());
    v("question_key", question_key, "field of the question", not_empty());
    v("answer_key", answer_key, "field of the gold answer", not_empty());
    v("completion_key", completion_key, "field of the completion, for sft", not_empty());
    v("id_key", id_key, "field that names a problem; lines without it are named by their number",
      not_empty());
    v("layout", layout, "how questions become prompts");
    v("few_shot", few_shot, "worked examples");
  }
};

// The problems of a file. Worked examples that come from the file itself are taken out of it; so is every
// record that is one of the examples. UserError also where nothing is left.
Dataset read_dataset(const DatasetSettings& settings);

// An example of supervised training: either a conversation that ends with the assistant, or a prompt and its
// completion as plain text, to be concatenated as they are.
struct SftExample {
  std::vector<Message> messages;
  std::string prompt;
  std::string completion;
};

// The examples of a file: `messages`, `prompt` + `completion`, or `prompt`/`question` + `answer`. The prompt
// is the one that read_dataset gives for the same settings, so that what is warmed up is what is then
// trained; an answer gets layout.answer_prefix in front, a `completion` nothing.
std::vector<SftExample> read_sft(const DatasetSettings& settings);

}  // namespace bough

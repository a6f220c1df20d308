// Prompts for `bough rollout`: JSON Lines with `prompt` (a text), `messages` (a conversation for the model's
// chat template, with `tools` if it has some; `prompt` may be this list, too) or `input_ids`. The optional
// field `group` or `id` (a text or an integer) names the prompt's group of samples in the rollout file. The
// default name is the line number.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/json.h"
#include "data/problems.h"

namespace bough {

struct Prompt {
  std::string group;
  std::vector<int32_t> input_ids;
  Json extra;  // the line's other fields, an object
};

struct PromptReadOptions {
  // Converts the text of a prompt, or a conversation, to token ids. If no function is set, a line with
  // either is an error.
  std::function<std::vector<int32_t>(const Problem&)> encode;
  int64_t vocab_size = 0;  // a token id must be below it; 0: not checked
  int64_t max_length = 0;  // tokens of the model's context, of which a response needs one; 0: not checked
  std::string max_length_reason;  // for messages: the key of config.json that sets max_length
};

// Throws UserError, with file, line and field, if a line has one of these faults: malformed JSON, not one
// of `prompt`, `messages` and `input_ids`, a wrong type, an empty prompt, a prompt that does not fit the
// context, a token id outside the vocabulary (with its position). Also throws UserError if the file has no
// prompts or is a directory.
std::vector<Prompt> read_prompts(const std::filesystem::path& path, const PromptReadOptions& options);

}  // namespace bough

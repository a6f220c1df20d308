// Prompts for `bough rollout`: JSON Lines with `prompt` (text) or `input_ids`. The optional field `group` or
// `id` (a text or an integer) names the group in the rollouts. The default name is the line number.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/json.h"

namespace bough {

struct Prompt {
  std::string group;
  std::vector<int32_t> input_ids;
  Json extra;  // the line's other fields, an object
};

struct PromptReadOptions {
  // Turns text into token ids. If empty, a line with `prompt` is an error: a tokenizer is needed.
  std::function<std::vector<int32_t>(const std::string&)> encode;
  int64_t vocab_size = 0;  // ids must be below it; 0: not checked
};

// Throws UserError, with file, line and field, in these cases: malformed JSON, both or neither of prompt and
// input_ids, a wrong type, an empty prompt, an id outside the vocabulary (with its position). Also throws it
// if the file has no prompts or is a directory.
std::vector<Prompt> read_prompts(const std::filesystem::path& path, const PromptReadOptions& options);

}  // namespace bough

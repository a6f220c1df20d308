// Prompts for `bough rollout`: JSON Lines with `prompt` (a text) or `input_ids`. The optional field `group`
// or `id` (a text or an integer) names the prompt's group of samples in the rollout file. The default name is
// the line number.
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
  // Converts text to token ids. If no function is set, a line with `prompt` is an error.
  std::function<std::vector<int32_t>(const std::string&)> encode;
  int64_t vocab_size = 0;  // a token id must be below it; 0: not checked
};

// Throws UserError, with file, line and field, if a line has one of these faults: malformed JSON, both or
// neither of `prompt` and `input_ids`, a wrong type, an empty prompt, a token id outside the vocabulary (with
// its position). Also throws UserError if the file has no prompts or is a directory.
std::vector<Prompt> read_prompts(const std::filesystem::path& path, const PromptReadOptions& options);

}  // namespace bough

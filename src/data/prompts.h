// Prompts for `bough rollout`: JSON Lines with `prompt` (text) or `input_ids`, and optionally `group` or `id`
// (a text or an integer), which names the group in the rollouts; without it the line's number does.
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
  // Text to token ids; without it a line with `prompt` is an error that says a tokenizer is needed.
  std::function<std::vector<int32_t>(const std::string&)> encode;
  int64_t vocab_size = 0;  // ids must be below it; 0: not checked
};

// UserError names file, line and field: malformed JSON, both or neither of prompt and input_ids, a wrong
// type, an empty prompt, an id outside the vocabulary (with its position), a file without prompts, a
// directory.
std::vector<Prompt> read_prompts(const std::filesystem::path& path, const PromptReadOptions& options);

}  // namespace bough

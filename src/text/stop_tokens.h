// The tokens that end an answer. Training, serving, evaluation, rollout and saved models all use this list.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "text/tokenizer.h"

namespace bough {

// Returns the stop tokens of a model directory, each once:
//   - eos_token_id (a number or a list) of generation_config.json, else of config.json;
//   - eos_token, if a file of the tokenizer names it (special_tokens.h);
//   - the token that ends a turn of the assistant in the chat template: the first special token that the
//     template writes after the content, which `bough sft` teaches.
// The last two need the directory's tokenizer. The first of the list is the one that is appended to plain
// completions. May be empty. Throws UserError if a file is not valid.
std::vector<int32_t> load_stop_tokens(const std::filesystem::path& directory,
                                      const std::optional<Tokenizer>& tokenizer);

}  // namespace bough

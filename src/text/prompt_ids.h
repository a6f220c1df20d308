// Token ids of a plain prompt, which has no chat template.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace bough {

// Encodes `text` with the special tokens of the tokenizer's own template (such as a BOS). If the text itself
// begins with those that stand in front, they are not added a second time; the log says so once. Data sets of
// prompts that a chat template has rendered have such texts.
std::vector<int32_t> encode_plain_prompt(const Tokenizer& tokenizer, std::string_view text);

}  // namespace bough

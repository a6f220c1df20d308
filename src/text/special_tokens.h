// The special and added tokens that a model directory names outside tokenizer.json.
//
// They come from tokenizer_config.json, special_tokens_map.json, added_tokens.json and the defaults of the
// tokenizer's class, with the precedence of transformers 5 (_from_pretrained of tokenization_utils_base.py,
// __init__ of TokenizersBackend):
//   - If tokenizer_config.json has added_tokens_decoder, the two other files are not read.
//   - If not, the values of special_tokens_map.json replace those of tokenizer_config.json.
//   - A class has defaults for keys that no file has. A null in a file means that there is no such token.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "text/chat_template_value.h"
#include "text/tokenizer_added.h"

namespace bough {

struct SpecialTokens {
  // An id below 0: the token gets the next free id, or its id in the vocabulary.
  struct Added {
    AddedToken token;
    std::string where;   // file and key, for messages
    bool named = false;  // a name such as eos_token makes it special, whatever its own flag says
  };

  // The variables that transformers passes to chat templates: bos_token, eos_token, ..., and the named tokens
  // that the model's own files add.
  OrderedJson named = OrderedJson::object();
  // eos_token as a file names it. Empty if none does, or only the tokenizer's class has a default.
  std::string eos;
  // The tokens that transformers adds to those of tokenizer.json, in its order.
  std::vector<Added> added;
};

// Throws UserError if a file is not valid. A directory without these files has no such tokens.
SpecialTokens load_special_tokens(const std::filesystem::path& directory);

}  // namespace bough

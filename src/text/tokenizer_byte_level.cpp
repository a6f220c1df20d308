// The tokenizer that `bough init` gives to a new model.
#include <nlohmann/json.hpp>

#include "text/chat_template.h"
#include "text/tokenizer.h"
#include "text/tokenizer_bpe.h"

namespace bough {

using nlohmann::ordered_json;

std::string byte_level_tokenizer_json() {
  ordered_json vocabulary = ordered_json::object();
  for (int byte = 0; byte < 256; ++byte) vocabulary[byte_level_characters()[byte]] = byte;
  ordered_json added = ordered_json::array();
  int id = 256;
  for (const char* content : {"<|endoftext|>", "<|im_start|>", "<|im_end|>"})
    added.push_back({{"id", id++},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  // use_regex is off: without merges, cutting the text into words has no effect.
  const ordered_json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  const ordered_json file = {{"version", "1.0"},
                             {"truncation", nullptr},
                             {"padding", nullptr},
                             {"added_tokens", added},
                             {"normalizer", nullptr},
                             {"pre_tokenizer", byte_level},
                             {"post_processor", byte_level},
                             {"decoder", byte_level},
                             {"model",
                              {{"type", "BPE"},
                               {"dropout", nullptr},
                               {"unk_token", nullptr},
                               {"continuing_subword_prefix", nullptr},
                               {"end_of_word_suffix", nullptr},
                               {"fuse_unk", false},
                               {"byte_fallback", false},
                               {"ignore_merges", false},
                               {"vocab", vocabulary},
                               {"merges", ordered_json::array()}}}};
  return file.dump(2) + "\n";
}

std::string byte_level_tokenizer_config_json() {
  const ordered_json file = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                             {"eos_token", "<|im_end|>"},
                             {"pad_token", "<|endoftext|>"},
                             {"clean_up_tokenization_spaces", false},
                             {"chat_template", chatml_template()}};
  return file.dump(2) + "\n";
}

}  // namespace bough

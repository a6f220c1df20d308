// A GGUF file's vocabulary to tokenizer.json, tokenizer_config.json and the token ids of the configs.
//
// tokenizer.ggml.model  gpt2   byte-level BPE. The file has tokens, their types and merges; how text is cut
//                              into words it only names (tokenizer.ggml.pre), and a table here spells it out.
//                       llama  SentencePiece BPE. Merges follow from the scores, bytes without a token become
//                              <0xNN>, spaces become U+2581.
// Any other is refused by name, as is a pre-tokenizer that the table lacks: a wrong cut gives wrong ids.
//
// Where transformers' own conversion of the same file is not what the original tokenizer.json says, this
// follows the original: byte_fallback is for SentencePiece only, each `pre` has its own pre-tokenizer
// (transformers looks at the architecture), bos and eos are not swapped, every control token is special, and
// so is <unk>; a BOS is added where the file says so.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "models/gguf.h"

namespace bough {

struct GgufTokenizer {
  Json tokenizer;              // tokenizer.json
  Json tokenizer_config;       // tokenizer_config.json
  Json bos, eos, pad;          // a token id or null
  std::vector<int64_t> stops;  // eos and whatever else ends an answer; may be empty
  int64_t num_tokens = 0;      // of the file, unused ones too: at most the embedding's rows
  std::string description;     // "gpt2/smollm"
};

// `pre` replaces tokenizer.ggml.pre where it is not empty: a remedy for files that name none or a wrong one.
GgufTokenizer read_gguf_tokenizer(const GgufFile& file, const std::string& pre);

}  // namespace bough

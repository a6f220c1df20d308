// Text to token ids and back by byte pair encoding, read from tokenizer.json.
//
// The file is the one that Hugging Face's `tokenizers` writes; ids and decoded text equal that library's
// (0.23). Supported are
//   model           BPE over bytes (GPT-2, Llama 3, Qwen, SmolLM2, DeepSeek) or over characters (Llama 2,
//                   Mistral, Gemma, Phi-3), its vocabulary complete or not: unk_token, fuse_unk,
//                   byte_fallback, ignore_merges (tokenizer_bpe.h)
//   normalizer      NFC, Prepend, Replace, Strip (tokenizer_normalizer.h)
//   pre_tokenizer   ByteLevel, Metaspace, Split, Digits, WhitespaceSplit (pre_tokenizer.h)
//   post_processor  ByteLevel, one TemplateProcessing
//   decoder         ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip (tokenizer_decoder.h)
// with a Sequence of each, and added tokens with every flag. Anything else in the file (WordPiece, Unigram
// and WordLevel models among it) is a UserError that names it.
//
// The file's `truncation` and `padding` are not applied: lengths are the caller's business (transformers does
// the same unless told otherwise).
//
// Encoding runs in three steps: added tokens are cut out of the text, what lies between is normalized and cut
// into words, each word is merged by rank.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer_decoder.h"

namespace bough {

class Tokenizer {
 public:
  // `file` is a tokenizer.json, or a directory that holds one. UserError if it is missing, not JSON, or asks
  // for something unsupported.
  static Tokenizer load(const std::filesystem::path& file);
  // Makes a tokenizer from the content of a tokenizer.json; `name` is what error messages call the file.
  static Tokenizer from_json(std::string_view json_text, const std::string& name);

  // Added tokens are recognised inside `text`, special ones too. `add_special_tokens` also applies the file's
  // template (Llama 3: the begin-of-text token in front). UserError if `text` is not valid UTF-8.
  std::vector<int32_t> encode(std::string_view text, bool add_special_tokens = false) const;

  // Encodes a text that goes on after another one, which was encoded before: where encode() would put a space
  // in front of the text (Prepend, Metaspace, add_prefix_space), this does not.
  std::vector<int32_t> encode_continuation(std::string_view text) const;

  // The text of the tokens, with U+FFFD for what is not UTF-8. The space that encode() may have put in front
  // of a text is taken off again. Ids that no token has give nothing (a model's embedding is often padded
  // beyond its vocabulary).
  std::string decode(std::span<const int32_t> ids, bool skip_special_tokens = true) const;

  // One more than the largest token id.
  int64_t vocab_size() const;
  // The id of a token as the file spells it: "Ġthe" for " the", or an added token's content.
  std::optional<int32_t> token_to_id(std::string_view token) const;
  // The bytes that a token stands for inside a text: perhaps part of a character, and with its leading space.
  // Empty if no token has this id.
  const std::string& id_to_bytes(int32_t id) const;
  // True for an added token marked special; `decode` leaves these out.
  bool is_special(int32_t id) const;

 private:
  friend class StreamDecoder;
  struct Data;  // immutable but for a cache of words with its own locks: copies share it, threads may too
  explicit Tokenizer(std::shared_ptr<const Data> data) : data_(std::move(data)) {}
  std::vector<int32_t> encode_after(std::string_view text, bool continues) const;
  std::shared_ptr<const Data> data_;
};

// Decodes token by token. The pieces given out, `finish()` included, concatenate to Tokenizer::decode of all
// ids. Held back is what later tokens may change: bytes of a character that is not complete yet and, where
// the file's decoder is ByteFallback, a run of byte tokens until it ends.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer, bool skip_special_tokens = true);
  std::string push(int32_t id);
  // Gives out what was held back, as it is if nothing follows. The decoder is then as new.
  std::string finish();

 private:
  Tokenizer tokenizer_;
  bool skip_special_tokens_;
  TokenDecoder::Run run_;
};

// The tokenizer of `bough init`: a token for each byte (its id is the byte's value), <|endoftext|> 256,
// <|im_start|> 257, <|im_end|> 258, no merges. transformers.AutoTokenizer loads a directory with both files.
std::string byte_level_tokenizer_json();
// The tokenizer_config.json of `bough init`: ChatML as the chat template, <|im_end|> ends a turn,
// <|endoftext|> pads.
std::string byte_level_tokenizer_config_json();

}  // namespace bough

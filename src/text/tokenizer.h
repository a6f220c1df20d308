// Converts text to token ids and back by byte pair encoding, as described by a tokenizer.json.
//
// The file is the one that Hugging Face's `tokenizers` writes. Ids and decoded text equal those of version
// 0.23. Supported are
//   model           BPE over bytes (GPT-2, Llama 3, Qwen, SmolLM2, DeepSeek) or over characters (Llama 2,
//                   Mistral, Gemma, Phi-3), with unk_token, fuse_unk, byte_fallback, ignore_merges
//                   (tokenizer_bpe.h)
//   normalizer      NFC, Prepend, Replace, Strip (tokenizer_normalizer.h)
//   pre_tokenizer   ByteLevel, Metaspace, Split, Digits, WhitespaceSplit (pre_tokenizer.h)
//   post_processor  ByteLevel, one TemplateProcessing
//   decoder         ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip (tokenizer_decoder.h)
// with a Sequence of each, and added tokens with every flag. Anything else in the file, such as WordPiece,
// Unigram and WordLevel models, throws a UserError that names it.
//
// The file's `truncation` and `padding` are not applied, as in transformers by default. The caller bounds
// lengths.
//
// Encoding has three steps: the text is split at added tokens, the text between them is normalized and split
// into words, and each word is merged by rank.
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
  // `file` is a tokenizer.json, or a directory that holds one. Throws UserError if it is missing, not JSON,
  // or needs something unsupported.
  static Tokenizer load(const std::filesystem::path& file);
  // Makes a tokenizer from the content of a tokenizer.json. Error messages call the file `name`.
  static Tokenizer from_json(std::string_view json_text, const std::string& name);

  // Added tokens inside `text` are recognised, special ones too. `add_special_tokens` applies the file's
  // template (Llama 3: the begin-of-text token in front). Throws UserError if `text` is not valid UTF-8.
  std::vector<int32_t> encode(std::string_view text, bool add_special_tokens = false) const;

  // Encodes a text that continues another one, which was encoded before. Unlike encode(), it never puts a
  // space in front of the text (Prepend, Metaspace, add_prefix_space).
  std::vector<int32_t> encode_continuation(std::string_view text) const;

  // Returns the text of the tokens. U+FFFD replaces bytes that are not UTF-8. The space that encode() may
  // have put in front of a text is removed. Unknown ids give no text, because a model's embedding is often
  // padded beyond its vocabulary.
  std::string decode(std::span<const int32_t> ids, bool skip_special_tokens = true) const;

  // One more than the largest token id.
  int64_t vocab_size() const;
  // The id of a token, spelled as in the file: "Ġthe" for " the", or an added token's content.
  std::optional<int32_t> token_to_id(std::string_view token) const;
  // The bytes of a token inside a text, with its leading space. They may be part of a character. Empty if no
  // token has this id.
  const std::string& id_to_bytes(int32_t id) const;
  // True for an added token marked special. `decode` leaves these out by default.
  bool is_special(int32_t id) const;

 private:
  friend class StreamDecoder;
  struct Data;  // shared by copies; thread-safe: immutable, except for a cache of words with its own locks
  explicit Tokenizer(std::shared_ptr<const Data> data) : data_(std::move(data)) {}
  std::vector<int32_t> encode_after(std::string_view text, bool continues) const;
  std::shared_ptr<const Data> data_;
};

// Decodes token by token. The returned pieces, `finish()` included, concatenate to Tokenizer::decode of all
// ids. Text that later tokens may change is held back: bytes of an incomplete character, and with the decoder
// ByteFallback a run of byte tokens until it ends.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer, bool skip_special_tokens = true);
  std::string push(int32_t id);
  // Returns the text that was held back. The decoder can then be used for another text.
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

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
// The file's `truncation` and `padding` are not applied, as in transformers by default. The caller must limit
// lengths.
//
// Encoding has three steps. The text is split at added tokens. The text between them is normalized and split
// into words. In each word, tokens are merged by rank.
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

struct SpecialTokens;

class Tokenizer {
 public:
  // `file` is a tokenizer.json, or a directory that holds one. If it is a directory, the tokens that only its
  // other files name (special_tokens.h) are added. Throws UserError if a file is missing, not JSON, or needs
  // something unsupported.
  static Tokenizer load(const std::filesystem::path& file);
  // Makes a tokenizer from the content of a tokenizer.json. Error messages call the file `name`.
  static Tokenizer from_json(std::string_view json_text, const std::string& name);

  // Recognises added tokens inside `text`, special ones too. With `add_special_tokens`, applies the
  // post_processor of the file (Llama 3: the begin-of-text token in front). Throws UserError if `text` is not
  // valid UTF-8.
  std::vector<int32_t> encode(std::string_view text, bool add_special_tokens = false) const;

  // Encodes a text that continues a text which was encoded before. Unlike encode(), it never puts a space in
  // front of `text` (Prepend, Metaspace, add_prefix_space).
  std::vector<int32_t> encode_continuation(std::string_view text) const;

  // Returns the text of the tokens. U+FFFD replaces bytes that are not UTF-8. The space that encode() may
  // have put in front of a text is removed. An id without a token gives no text, because a model's embedding
  // often has more rows than the vocabulary has tokens.
  std::string decode(std::span<const int32_t> ids, bool skip_special_tokens = true) const;

  // One more than the largest token id.
  int64_t vocab_size() const;
  // The id of a token, spelled as in the file: "Ġthe" for " the", or an added token's content.
  std::optional<int32_t> token_to_id(std::string_view token) const;
  // The bytes of the token as it is decoded inside a text, with its leading space. The bytes may be an
  // incomplete UTF-8 character. Empty if no token has this id.
  const std::string& id_to_bytes(int32_t id) const;
  // True for an added token that the file marks as special. By default, decode() leaves such tokens out.
  bool is_special(int32_t id) const;

 private:
  friend class StreamDecoder;
  struct Data;  // common to all copies; thread-safe: constant, except for a cache of words with locks
  explicit Tokenizer(std::shared_ptr<const Data> data) : data_(std::move(data)) {}
  static Tokenizer make(std::string_view json_text, const std::string& name, const SpecialTokens& others);
  std::vector<int32_t> encode_after(std::string_view text, bool continues) const;
  std::shared_ptr<const Data> data_;
};

// Decodes token by token. The concatenation of all returned pieces, that of finish() included, equals
// Tokenizer::decode of all ids. Text that later tokens may change is held back: bytes of an incomplete
// character, and, with the decoder ByteFallback, a run of byte tokens until the run ends.
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

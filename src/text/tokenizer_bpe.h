// Byte pair encoding of single words (Sennrich et al. 2016), over bytes as in GPT-2 or over characters as in
// SentencePiece.
//
// A word starts as one token per byte or character. The adjacent pair whose merge has the lowest rank (the
// leftmost such pair) is replaced by the merged token. This repeats until no adjacent pair has a merge. O(n
// log n) in the word's length.
//
// A character without a token becomes, as in `tokenizers`,
//   1. with byte_fallback, the tokens <0xNN> of its UTF-8 bytes, if all of them exist,
//   2. else unk_token, if the file has one; with fuse_unk, one for several such characters in a row,
//   3. else nothing.
// If tokens are over bytes, the same rules apply to a byte, written as the vocabulary's character for it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/json.h"

namespace bough {

// The printable character that byte-level vocabularies write for each byte, in UTF-8 (GPT-2's table).
const std::array<std::string, 256>& byte_level_characters();

// Returns the bytes that a token's spelling in the vocabulary stands for. If one of its characters stands for
// no byte, returns the UTF-8 bytes of the spelling, as `tokenizers` does, and sets *exact to false (else to
// true).
std::string byte_level_decode(std::string_view spelling, bool* exact = nullptr);

class BytePairEncoder {
 public:
  // Reads the `model` of tokenizer.json. `byte_level`: true if tokens are over bytes, false if over
  // characters. Throws UserError that names what is unsupported or inconsistent.
  static BytePairEncoder from_json(const Json& model, bool byte_level, const std::string& where);

  BytePairEncoder(BytePairEncoder&&) noexcept;
  ~BytePairEncoder();

  // Appends the word's ids. `word` may be any bytes; if tokens are over characters, it must be valid UTF-8.
  // Throws UserError if unk_token is needed but is not in the vocabulary. Thread-safe.
  void encode(std::string_view word, std::vector<int32_t>& ids) const;

  // Maps each spelling in the file to its id.
  const std::unordered_map<std::string, int32_t>& vocabulary() const { return vocabulary_; }

 private:
  class MergeTable;
  class Cache;
  BytePairEncoder();
  class Symbols;
  void read_vocabulary(const Json& vocabulary, const std::string& where);
  void read_units();
  void read_merges(const Json& merges, const std::string& where);
  int32_t character_id(char32_t character) const;
  void encode_part(std::string_view part, std::vector<int32_t>& ids) const;
  void add_unknown(std::string_view character, Symbols& symbols) const;
  std::vector<int32_t> merge(std::string_view word) const;

  std::unordered_map<std::string, int32_t> vocabulary_;
  std::unordered_map<std::string, int32_t> whole_words_;  // bytes to id; filled only if ignore_merges
  bool byte_level_ = true;
  bool ignore_merges_ = false;
  bool byte_fallback_ = false;
  bool fuse_unknown_ = false;
  std::optional<std::string> unknown_token_;  // empty: characters without a token are dropped
  int32_t unknown_id_ = -1;                   // -1: not in the vocabulary

  // Ids (-1: none) of single bytes, of single characters (rare characters are in the map), and of <0xNN>.
  std::array<int32_t, 256> byte_ids_{};
  std::vector<int32_t> character_ids_;
  std::unordered_map<char32_t, int32_t> rare_character_ids_;
  std::array<int32_t, 256> fallback_ids_{};

  // The characters that stand before ▁ in the merged token of some merge. After any other character, no merge
  // joins text before and after the start of a ▁. At these places a text is split into parts, which are
  // encoded and cached separately.
  std::unordered_set<char32_t> before_mark_;
  std::unique_ptr<MergeTable> merges_;
  std::unique_ptr<Cache> cache_;
};

}  // namespace bough

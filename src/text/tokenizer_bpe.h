// Byte pair encoding of single words (Sennrich et al. 2016), over bytes as in GPT-2 or over characters as in
// SentencePiece.
//
// A word starts as one token a byte or character; again and again the adjacent pair whose merge has the
// lowest rank is replaced by its product, the leftmost first, until no pair has a merge. O(n log n) in the
// word's length.
//
// What has no token becomes, as in `tokenizers`: with byte_fallback the tokens <0xNN> of its UTF-8 bytes, if
// all of them exist; else unk_token, one for several in a row if fuse_unk; else nothing. Over bytes that
// holds for the character that the vocabulary writes for the byte.
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

// The bytes that a vocabulary's spelling stands for; if one of its characters stands for no byte, the
// spelling's own UTF-8 bytes (so decodes `tokenizers`). `exact` tells which it was.
std::string byte_level_decode(std::string_view spelling, bool* exact = nullptr);

class BytePairEncoder {
 public:
  // Reads the `model` of tokenizer.json; `byte_level`: it works over bytes. UserError names what is
  // unsupported or inconsistent.
  static BytePairEncoder from_json(const Json& model, bool byte_level, const std::string& where);

  BytePairEncoder(BytePairEncoder&&) noexcept;
  ~BytePairEncoder();

  // Appends the word's ids. `word` are any bytes, or valid UTF-8 if it works over characters. Thread-safe.
  // UserError: something has no token, and the file names an unk_token that does not exist.
  void encode(std::string_view word, std::vector<int32_t>& ids) const;

  // Maps each spelling to its id, as in the file.
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
  std::optional<std::string> unknown_token_;  // none: what has no token is dropped
  int32_t unknown_id_ = -1;                   // -1: the vocabulary lacks it

  // Ids, or -1, of single bytes, of single characters (those beyond the table in the map) and of <0xNN>.
  std::array<int32_t, 256> byte_ids_{};
  std::vector<int32_t> character_ids_;
  std::unordered_map<char32_t, int32_t> rare_character_ids_;
  std::array<int32_t, 256> fallback_ids_{};

  // Characters before ▁ inside some merge's product. Behind any other character no merge crosses the begin of
  // a ▁, so that a text is cut there into parts that are encoded, and remembered, on their own.
  std::unordered_set<char32_t> before_mark_;
  std::unique_ptr<MergeTable> merges_;
  std::unique_ptr<Cache> cache_;
};

}  // namespace bough

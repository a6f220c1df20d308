// Byte pair encoding of single words (Sennrich et al. 2016, over bytes as in GPT-2).
//
// A word starts as one token a byte; again and again the adjacent pair whose merge has the lowest rank is
// replaced by its product, the leftmost first, until no pair has a merge. O(n log n) in the word's length.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
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
  // From the `model` of tokenizer.json. UserError names what is unsupported or inconsistent.
  static BytePairEncoder from_json(const Json& model, const std::string& where);

  BytePairEncoder(BytePairEncoder&&) noexcept;
  ~BytePairEncoder();

  // Appends the word's ids. `word` are any bytes. Thread-safe.
  void encode(std::string_view word, std::vector<int32_t>& ids) const;

  // Spelling to id, as in the file.
  const std::unordered_map<std::string, int32_t>& vocabulary() const { return vocabulary_; }

 private:
  class MergeTable;
  class Cache;
  BytePairEncoder();
  void read_vocabulary(const Json& vocabulary, const std::string& where);
  void read_merges(const Json& merges, const std::string& where);
  std::vector<int32_t> merge(std::string_view word) const;

  std::unordered_map<std::string, int32_t> vocabulary_;
  std::unordered_map<std::string, int32_t> whole_words_;  // bytes to id; filled only if ignore_merges
  bool ignore_merges_ = false;
  std::array<int32_t, 256> byte_ids_{};
  std::unique_ptr<MergeTable> merges_;
  std::unique_ptr<Cache> cache_;
};

}  // namespace bough

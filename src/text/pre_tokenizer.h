// Cuts normalized text into the words that byte pair encoding works on: the `pre_tokenizer` of
// tokenizer.json.
//
// Supported: ByteLevel; Metaspace; Split by Regex or String, every behavior, inverted or not; Digits;
// WhitespaceSplit; a Sequence of these; none (the whole text is one word).
//
// ByteLevel replaces bytes by printable characters. Where it comes last, words come out as plain bytes and
// the map exists in the vocabulary only (byte_level()); otherwise what follows sees the characters.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "text/tokenizer_json.h"
#include "text/tokenizer_normalizer.h"
#include "text/unicode_regex.h"

namespace bough {

class PreTokenizer {
 public:
  // `where` is what error messages call the file. UserError names what is not supported.
  static PreTokenizer from_json(const Json& description, const std::string& where);

  // Whether words are bytes, each of which has a character in the vocabulary; otherwise words are texts.
  bool byte_level() const { return byte_level_; }

  // Calls `word` for each word of `text`, in order; the views live only during the call. `text` must be valid
  // UTF-8. Thread-safe.
  void split(std::string_view text, const TextStart& start,
             const std::function<void(std::string_view)>& word) const;

 private:
  enum class Kind { kCut, kPrefixSpace, kMetaspace, kByteCharacters };
  enum class Behavior { kIsolated, kRemoved, kContiguous, kMergedWithPrevious, kMergedWithNext };
  struct Step {
    Kind kind;
    std::optional<unicode::Regex> regex;  // of a cut
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
    tokenizer_json::Metaspace metaspace;
  };
  struct Piece {  // of the text, in bytes
    size_t begin, end;
  };
  class Cutting;

  void add(const Json& description, const std::string& where);
  void add_split(const Json& description, const std::string& where);
  void add_cut(unicode::Regex regex, Behavior behavior, bool invert = false);

  std::vector<Step> steps_;
  bool byte_level_ = false;
};

}  // namespace bough

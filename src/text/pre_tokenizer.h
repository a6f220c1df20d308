// Splits normalized text into words for byte pair encoding: the `pre_tokenizer` of tokenizer.json.
//
// Supported: ByteLevel; Metaspace; Split by Regex or String with every behavior, inverted or not; Digits;
// WhitespaceSplit; a Sequence of these; no pre_tokenizer (the whole text is one word).
//
// ByteLevel maps bytes to printable characters. If ByteLevel is the last step, split() returns plain bytes,
// and only the vocabulary uses the mapping (byte_level()). Otherwise the steps after ByteLevel see the mapped
// characters.
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
  // `where` names the file in error messages. Throws UserError that names what is not supported.
  static PreTokenizer from_json(const Json& description, const std::string& where);

  // True if words are plain bytes, which the vocabulary spells with mapped characters. False if words are
  // UTF-8.
  bool byte_level() const { return byte_level_; }

  // Calls `word` for each word of `text`, in order. The view passed to `word` is valid only during that call.
  // `text` must be valid UTF-8. Thread-safe.
  void split(std::string_view text, const TextStart& start,
             const std::function<void(std::string_view)>& word) const;

 private:
  enum class Kind { kCut, kPrefixSpace, kMetaspace, kByteCharacters };
  enum class Behavior { kIsolated, kRemoved, kContiguous, kMergedWithPrevious, kMergedWithNext };
  struct Step {
    Kind kind;
    std::optional<unicode::Regex> regex;  // kCut
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

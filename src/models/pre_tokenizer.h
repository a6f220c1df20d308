// Cuts normalized text into the words that byte pair encoding works on: the `pre_tokenizer` of
// tokenizer.json.
//
// Supported: ByteLevel; Split by Regex or String, every behavior, inverted or not; Digits; a Sequence of
// these that ends in ByteLevel. Words come out as plain bytes: the map from bytes to printable characters
// that ByteLevel stands for exists in the vocabulary only.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "models/unicode_regex.h"

namespace bough {

class PreTokenizer {
 public:
  // `where` is what error messages call the file. UserError names what is not supported.
  static PreTokenizer from_json(const Json& description, const std::string& where);

  // Calls `word` for each word of `text`, in order; the views live only during the call. `text` must be valid
  // UTF-8. Thread-safe.
  void split(std::string_view text, const std::function<void(std::string_view)>& word) const;

 private:
  enum class Behavior { kIsolated, kRemoved, kContiguous, kMergedWithPrevious, kMergedWithNext };
  struct Step {
    unicode::Regex regex;
    Behavior behavior;
    bool invert;
  };
  struct Piece {  // of the text, in bytes
    size_t begin, end;
  };

  void add(const Json& description, const std::string& where);
  void add_split(const Json& description, const std::string& where);
  static void apply(const Step& step, std::string_view text, std::string_view subject, Piece piece,
                    std::vector<Piece>& out);

  std::vector<Step> steps_;
  bool add_prefix_space_ = false;
  bool byte_level_ = false;             // the last step was read
  std::vector<Step> byte_level_steps_;  // after the prefix space: GPT-2's regular expression, or none
};

}  // namespace bough

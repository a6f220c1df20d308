// The `normalizer` of tokenizer.json: changes the text before it is split into words.
//
// Supported: no normalizer, NFC, Prepend, Replace (of a String, or of a Regex that cannot match the empty
// string), Strip, and a Sequence of these. Any other (NFD, NFKC, NFKD, Lowercase, ...) throws a UserError
// that names it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "text/unicode_regex.h"

namespace bough {

// The place where a piece of text begins in the whole text. It decides whether a space is put in front of the
// piece.
struct TextStart {
  // Number of bytes at the start of the piece that come from the first character of the whole text. 0 if the
  // piece begins later, or if Strip removed that character: `tokenizers` compares offsets into the original
  // text.
  size_t bytes = 0;
  // True if the piece continues a text that was encoded before. Nothing is put in front of it.
  bool continues = false;

  // Returns the TextStart of the part of the piece that begins at byte `offset`.
  TextStart at(size_t offset) const {
    return {bytes > offset ? bytes - offset : 0, continues && offset == 0};
  }
};

class Normalizer {
 public:
  // `where` names the file in error messages. Throws UserError that names what is not supported.
  static Normalizer from_json(const Json& description, const std::string& where);

  bool empty() const { return steps_.empty(); }

  // Returns the normalized `text`, which must be valid UTF-8. On entry, `start` describes `text`; on return,
  // the result. Thread-safe.
  std::string normalize(std::string_view text, TextStart& start) const;

 private:
  enum class Kind { kNfc, kPrepend, kReplace, kStrip };
  struct Step {
    Kind kind;
    std::string content;                  // Prepend and Replace
    std::optional<unicode::Regex> regex;  // Replace
    bool left = false, right = false;     // Strip
  };
  void add(const Json& description, const std::string& where);
  static std::string nfc(std::string text, TextStart& start);
  static std::string prepend(const Step& step, std::string text, TextStart& start);
  static std::string replace(const Step& step, std::string text, TextStart& start);
  static std::string strip(const Step& step, std::string text, TextStart& start);

  std::vector<Step> steps_;
};

}  // namespace bough

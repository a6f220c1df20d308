// The `normalizer` of tokenizer.json: what happens to the text before it is cut into words.
//
// Supported: NFC, Prepend, Replace (by String, or by a Regex that cannot match nothing), Strip, and a
// Sequence of these; none. NFD, NFKC, NFKD, Lowercase and the rest are a UserError that names them.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "text/unicode_regex.h"

namespace bough {

// Where a stretch of text stands, which decides whether a space is put in front of it.
struct TextStart {
  // How many of the stretch's first bytes stand for the first character of the whole text; 0 if it begins
  // later. `tokenizers` compares offsets into the text as it was given: a beginning that Strip has taken off
  // is not the beginning any more.
  size_t bytes = 0;
  // True for a stretch that goes on after a text that was encoded before: nothing is put in front of it.
  bool continues = false;

  // Returns the start of the part of the stretch that begins at `offset`.
  TextStart at(size_t offset) const {
    return {bytes > offset ? bytes - offset : 0, continues && offset == 0};
  }
};

class Normalizer {
 public:
  // `where` is what error messages call the file. UserError names what is not supported.
  static Normalizer from_json(const Json& description, const std::string& where);

  bool empty() const { return steps_.empty(); }

  // Returns `text`, which must be valid UTF-8, normalized; `start` is that of `text` and becomes that of the
  // result. Thread-safe.
  std::string normalize(std::string_view text, TextStart& start) const;

 private:
  enum class Kind { kNfc, kPrepend, kReplace, kStrip };
  struct Step {
    Kind kind;
    std::string content;                  // of Prepend and Replace
    std::optional<unicode::Regex> regex;  // of Replace
    bool left = false, right = false;     // of Strip
  };
  void add(const Json& description, const std::string& where);
  static std::string nfc(std::string text, TextStart& start);
  static std::string prepend(const Step& step, std::string text, TextStart& start);
  static std::string replace(const Step& step, std::string text, TextStart& start);
  static std::string strip(const Step& step, std::string text, TextStart& start);

  std::vector<Step> steps_;
};

}  // namespace bough

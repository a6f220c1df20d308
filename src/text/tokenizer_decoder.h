// The `decoder` of tokenizer.json: converts the spellings of tokens to text.
//
// A decoder is a chain of steps over a list of texts. At first there is one text per token. At the end the
// texts are joined. The steps:
//   ByteLevel     joins all texts and converts characters to bytes; U+FFFD replaces invalid UTF-8
//   Metaspace     replaces ▁ by a space; in the first text removes ▁, unless prepend_scheme is "never"
//   Replace       replaces a String or Regex (one that cannot match the empty string) in each text
//   ByteFallback  <0xNN> is a byte; a run of them becomes one text, or one U+FFFD per byte if it is not UTF-8
//   Fuse          joins all texts
//   Strip         removes up to `start` characters from the start of each text
//   Sequence      a chain of these
// Anything else, such as Strip at the end of texts, throws a UserError that names it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "text/tokenizer_json.h"
#include "text/unicode_regex.h"

namespace bough {

class TokenDecoder {
 public:
  // `where` names the file in error messages. Throws UserError that names what is not supported.
  static TokenDecoder from_json(const Json& description, const std::string& where);

  // Applies the leading steps, as far as each acts on every token alone, and returns the result, which Run
  // takes. So these steps run once per vocabulary entry.
  std::string prepare(std::string_view spelling) const;

  // The bytes of a prepared token as decoded inside a text, with its leading space. They may be an incomplete
  // character.
  std::string bytes_inside(std::string_view prepared) const;

  class Run;

 private:
  enum class Kind { kByteLevel, kMetaspace, kReplace, kByteFallback, kFuse, kStrip };
  struct Step {
    Kind kind;
    std::string text;                     // Replace: the content; Metaspace and Strip: the character
    std::optional<unicode::Regex> regex;  // Replace
    size_t start = 0;                     // Strip
    bool drops_first = false;             // Metaspace
    // True if an earlier step joins all texts. Then the joined text reaches this step in several parts.
    bool in_parts = false;
    // True if the step needs a whole text at once. If also in_parts, the step returns nothing before the text
    // ends.
    bool wants_whole = false;
  };
  void add(const Json& description, const std::string& where);
  static std::string replace(const Step& step, std::string_view text);

  std::vector<Step> steps_;
  size_t num_prepared_ = 0;  // number of steps that prepare() applies
};

// Decodes one list of tokens. It returns only whole characters, and holds back text that later tokens may
// change. The TokenDecoder must outlive the Run.
class TokenDecoder::Run {
 public:
  explicit Run(const TokenDecoder& decoder) : decoder_(&decoder), states_(decoder.steps_.size()) {}

  // Appends to `out` the text that no later token can change, after the next prepared token.
  void push(std::string_view prepared, std::string& out);
  // Appends the text that was held back. The run can then decode another list.
  void finish(std::string& out);

 private:
  struct State {
    std::string held;    // an incomplete character or run of bytes, or a text that wants_whole
    bool begun = false;  // some text has arrived
    bool first = false;  // the current text is the first one
    bool given = false;  // ByteLevel: some text has been passed to the next step
    size_t left = 0;     // Strip: number of characters that may still be removed from this text
  };
  // Passes a part of a text to step `i`; step `i` appends its result to `out` through the steps after it.
  // `begins`: `part` is the first part of its text.
  void take(size_t i, std::string_view part, bool begins, std::string& out);
  void whole(size_t i, std::string_view text, std::string& out);
  void end(size_t i, std::string& out);
  void give_characters(size_t i, bool last, std::string& out);
  void give_byte_run(size_t i, std::string& out);

  const TokenDecoder* decoder_;
  std::vector<State> states_;
};

}  // namespace bough

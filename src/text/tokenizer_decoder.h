// The `decoder` of tokenizer.json: from the spellings of tokens to text.
//
// A decoder is a chain of steps over a list of texts, at first one a token, whose results are joined:
//   ByteLevel     all texts become one: their bytes, U+FFFD for what is not UTF-8
//   Metaspace     ▁ becomes a space; in the first text it vanishes, unless nothing was put in front
//   Replace       a String or Regex (that cannot match nothing) in each text
//   ByteFallback  <0xNN> is a byte: a run of such texts becomes one text or, if it is not UTF-8, one U+FFFD
//                 each
//   Fuse          all texts become one
//   Strip         takes up to `start` characters off the begin of each text
//   Sequence      of these
// Anything else, Strip at the end of texts among it, is a UserError that names it.
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
  // `where` is what error messages call the file. UserError names what is not supported.
  static TokenDecoder from_json(const Json& description, const std::string& where);

  // The form in which Run takes a token: what can be done for each token alone is done once.
  std::string prepare(std::string_view spelling) const;

  // The bytes that a token, as prepared, stands for inside a text: perhaps part of a character, and with its
  // leading space.
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
    // True where an earlier step has made one text of all, so that it comes to this step in parts.
    bool in_parts = false;
    // True for a step that needs a whole text at once: of one that comes in parts nothing is given out before
    // the end.
    bool wants_whole = false;
  };
  void add(const Json& description, const std::string& where);
  static std::string replace(const Step& step, std::string_view text);

  std::vector<Step> steps_;
  size_t num_prepared_ = 0;  // that many steps are done by prepare()
};

// One list of tokens being decoded. The pieces given out are joined whole characters; what later tokens may
// still change is held back. Refers to the decoder, which must outlive it.
class TokenDecoder::Run {
 public:
  explicit Run(const TokenDecoder& decoder) : decoder_(&decoder), states_(decoder.steps_.size()) {}

  // Appends to `out` what the next token, as prepared, adds for certain.
  void push(std::string_view prepared, std::string& out);
  // Appends what was held back. The run is then as new.
  void finish(std::string& out);

 private:
  struct State {
    std::string held;    // bytes of an unfinished character or run, or parts of a text that is wanted whole
    bool begun = false;  // some text has come
    bool first = false;  // the text that comes now is the first one
    bool given = false;  // ByteLevel: some text has been given on
    size_t left = 0;     // Strip: so many characters may still be taken off this text
  };
  // Takes a part of a text for step `i`; `begins`: it is the text's first part.
  void take(size_t i, std::string_view part, bool begins, std::string& out);
  void whole(size_t i, std::string_view text, std::string& out);
  void end(size_t i, std::string& out);
  void give_characters(size_t i, bool last, std::string& out);
  void give_byte_run(size_t i, std::string& out);

  const TokenDecoder* decoder_;
  std::vector<State> states_;
};

}  // namespace bough

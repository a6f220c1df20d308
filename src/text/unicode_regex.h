// Regular expressions of tokenizer.json, run by PCRE2 with the meaning they have in `tokenizers` (Oniguruma).
//
// Only constructs that mean the same in both are accepted. The rest (anchors, \w, \b, scripts, look-behind,
// nested classes, back references, ...) throws a UserError that names the construct. The two libraries have
// different Unicode versions. Therefore subjects must first pass through with_stand_ins() (unicode_text.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bough::unicode {

struct Match {
  size_t begin, end;  // bytes
};

class Regex {
 public:
  // Throws UserError if the pattern is invalid or not portable (check_portable). Messages begin with `where`.
  static Regex compile(std::string_view pattern, const std::string& where);
  // Matches exactly `text`, which must not be empty.
  static Regex literal(std::string_view text);

  // Compiles a pattern from our own code, which may use all of PCRE2.
  static Regex trusted(std::string_view pattern);

  // Whether subjects must pass through with_stand_ins() first. False only for a literal.
  bool wants_stand_ins() const { return literal_.empty(); }
  // Whether the pattern can match the empty string in some subject.
  bool may_match_nothing() const;

  // Returns all matches from left to right, without overlaps. `subject` must be valid UTF-8. An empty match
  // directly after another match is left out, as in Oniguruma's iterator. Thread-safe.
  std::vector<Match> find_all(std::string_view subject) const;

 private:
  Regex() = default;
  explicit Regex(std::string_view pattern, uint32_t options, const std::string& where);
  std::shared_ptr<const void> code_;  // pcre2_code; nullptr for a literal
  std::string literal_;
};

// Throws UserError if `pattern` uses a construct that could mean something else in PCRE2 than in Oniguruma.
void check_portable(std::string_view pattern, const std::string& where);

}  // namespace bough::unicode

// Regular expressions of tokenizer.json, run by PCRE2 with the meaning they have in `tokenizers` (Oniguruma).
//
// Only constructs that mean the same in both are accepted; the rest (anchors, \w, \b, scripts, look-behind,
// nested classes, back references, ...) is a UserError that names it. Code points on which the two libraries'
// Unicode versions differ are handled by with_stand_ins(): subjects must have passed through it.
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
  // `where` is what error messages call the place of the pattern.
  static Regex compile(std::string_view pattern, const std::string& where);
  // Matches exactly `text`, which must not be empty; its subjects are used as they are, without stand-ins.
  static Regex literal(std::string_view text);

  // Compiles a pattern of our own, which may use all of PCRE2.
  static Regex trusted(std::string_view pattern);

  // Whether subjects must have passed through with_stand_ins(), which those of a literal need not.
  bool wants_stand_ins() const { return literal_.empty(); }
  // Whether some subject has an empty match.
  bool may_match_nothing() const;

  // Returns all matches from left to right that do not overlap. `subject` must be valid UTF-8. Empty matches
  // directly after another match are left out, as Oniguruma's iterator does. Thread-safe.
  std::vector<Match> find_all(std::string_view subject) const;

 private:
  Regex() = default;
  explicit Regex(std::string_view pattern, uint32_t options, const std::string& where);
  std::shared_ptr<const void> code_;  // pcre2_code; none for a literal
  std::string literal_;
};

// Throws UserError if `pattern` uses a construct that could mean something else in PCRE2 than in Oniguruma.
void check_portable(std::string_view pattern, const std::string& where);

}  // namespace bough::unicode

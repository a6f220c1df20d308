// Regular expressions of tokenizer.json. PCRE2 runs them with the meaning that they have in `tokenizers`,
// which uses Oniguruma.
//
// Only constructs that mean the same in PCRE2 and Oniguruma are accepted. Any other (anchors, \w, \b,
// scripts, look-behind, nested classes, back references, ...) throws a UserError that names the construct.
// The two libraries have different Unicode versions. Therefore texts to search must first pass through
// with_stand_ins() (unicode_text.h).
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

  // Compiles a pattern of Bough's source code, which may use all of PCRE2.
  static Regex trusted(std::string_view pattern);

  // Whether texts to search must pass through with_stand_ins() first. False only for a literal pattern.
  bool wants_stand_ins() const { return literal_.empty(); }
  // Whether the pattern can match the empty string in some text.
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

// Checks whether a pattern means the same to PCRE2 and to Oniguruma. A parser knows the accepted constructs
// and refuses all others.
#include <algorithm>
#include <array>
#include <cctype>

#include "base/error.h"
#include "text/unicode_regex.h"
#include "text/unicode_tables.h"
#include "text/unicode_text.h"

namespace bough::unicode {
namespace {

// General categories. Scripts and binary properties are not accepted, because their meaning depends on the
// Unicode version.
constexpr std::array kProperties = {"L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N", "Nd",
                                    "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm",
                                    "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp", "Cc", "Cf", "Co"};

bool is_ascii_letter_or_digit(char32_t c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

class PatternChecker {
 public:
  PatternChecker(std::string_view pattern, const std::string& where) : pattern_(pattern), where_(where) {}

  void run() {
    while (position_ < pattern_.size()) {
      const char32_t c = peek();
      if (c == '[') char_class();
      else if (c == '\\') escape(false);
      else if (c == '(') open_group();
      else if (c == ')') close_group();
      else if (c == '{') interval();
      else if (c == '^' || c == '$') refuse(1, "an anchor");
      else if (c == '.') refuse(1, "'.'");
      else if (c == '*' || c == '+' || c == '?' || c == '|') take();
      else literal(take());
    }
  }

 private:
  char32_t peek() const {
    return position_ < pattern_.size() ? decode(pattern_.substr(position_)).code_point : 0;
  }
  char32_t take() {
    const Decoded next = decode(pattern_.substr(position_));
    position_ += next.length;
    return next.code_point;
  }
  bool starts(std::string_view text) const { return pattern_.substr(position_).starts_with(text); }

  [[noreturn]] void refuse(size_t length, std::string_view what) const {
    throw UserError(
        str(where_, ": the regular expression uses ", what, " (", quoted(pattern_.substr(position_, length)),
            " at byte ", position_,
            "), which is not supported. Supported are literals, classes, \\s \\d \\p{general category}, "
            "groups, (?i:...), look-ahead, alternatives and quantifiers"));
  }

  // Reads a literal. Refuses a code point that has another category in the two libraries: in a text to
  // search, a stand-in replaces it. Under (?i:...), a literal must be ASCII, and two adjacent literals must
  // not be the case folding of one character (ß, ﬁ, ﬆ).
  void literal(char32_t c) {
    check_range(c, c);
    if (ignore_case_depth_ == 0) return;
    if (c >= 0x80) refuse(1, "a letter outside ASCII inside (?i:...)");
    const char lower = static_cast<char>(c >= 'A' && c <= 'Z' ? c + 32 : c);
    const bool folds = (last_literal_ == 's' && (lower == 's' || lower == 't')) ||
                       (last_literal_ == 'f' && (lower == 'f' || lower == 'i' || lower == 'l'));
    if (folds && last_literal_end_ + 1 == position_)
      refuse(1, "letters that fold to one character inside (?i:...)");
    last_literal_ = lower;
    last_literal_end_ = position_;
  }

  void check_range(char32_t first, char32_t last) const {
    for (const StandIn& entry : kStandIns) {
      const bool overlaps = first <= entry.last && last >= entry.first;
      const bool holds_stand_in = first <= entry.code_point && last >= entry.code_point;
      if (overlaps || holds_stand_in) refuse(1, "code points on which Unicode versions differ");
    }
  }

  // Reads what follows a backslash. Returns the code point of an escaped literal, or 0 for a class such as
  // \s.
  char32_t escape(bool in_class) {
    const size_t begin = position_;
    take();
    const char32_t c = position_ < pattern_.size() ? take() : 0;
    switch (c) {
      case 's':
      case 'S':
      case 'd':
      case 'D': return 0;
      case 'r': return '\r';
      case 'n': return '\n';
      case 't': return '\t';
      case 'f': return '\f';
      case 'p':
      case 'P': property(begin); return 0;
      case 'x': return hexadecimal(begin);
      default: break;
    }
    if (c == 0 || c >= 0x80 || is_ascii_letter_or_digit(c)) {
      position_ = begin;
      refuse(2, "the escape");
    }
    if (!in_class) literal(c);
    return c;
  }

  void property(size_t begin) {
    const size_t close = pattern_.find('}', position_);
    if (peek() == '{' && close != std::string_view::npos) {
      std::string_view name = pattern_.substr(position_ + 1, close - position_ - 1);
      if (name.starts_with('^')) name.remove_prefix(1);
      if (std::find(kProperties.begin(), kProperties.end(), name) != kProperties.end()) {
        position_ = close + 1;
        return;
      }
    }
    position_ = begin;
    refuse(close == std::string_view::npos ? 3 : close + 1 - begin,
           "a property that is not a general category");
  }

  // Reads \xHH or \x{H...}.
  char32_t hexadecimal(size_t begin) {
    const bool braces = peek() == '{';
    if (braces) take();
    char32_t value = 0;
    size_t digits = 0;
    const size_t most = braces ? 6 : 2;
    for (; digits < most && position_ < pattern_.size() &&
           std::isxdigit(static_cast<unsigned char>(pattern_[position_]));
         ++digits)
      value =
          value * 16 + static_cast<char32_t>(std::stoi(std::string(1, pattern_[position_++]), nullptr, 16));
    const bool closed = !braces || (peek() == '}' && take());
    const bool good = braces ? digits > 0 : digits == 2 && value < 0x80;  // \x80 is a byte for Oniguruma
    if (!closed || !good) {
      position_ = begin;
      refuse(4, "a hexadecimal escape");
    }
    check_range(value, value);
    return value;
  }

  void char_class() {
    take();
    if (peek() == '^') {
      if (ignore_case_depth_ > 0) refuse(1, "a negated class inside (?i:...)");
      take();
    }
    if (peek() == ']') refuse(1, "']' at the start of a class");
    char32_t previous = 0;  // the previous literal, which a '-' makes the start of a range
    while (peek() != ']') {
      if (position_ >= pattern_.size()) refuse(1, "a class that is not closed");
      if (peek() == '[') refuse(2, "a class inside a class");
      if (starts("&&")) refuse(2, "an intersection of classes");
      const bool escaped = peek() == '\\';
      if (!escaped && peek() == '-' && previous != 0 && !pattern_.substr(position_ + 1).starts_with(']')) {
        take();
        if (peek() == '[') refuse(2, "a class inside a class");
        const char32_t last = peek() == '\\' ? escape(true) : take();
        if (last < previous) refuse(1, "a range that ends before it begins");
        check_range(previous, last);
        if (ignore_case_depth_ > 0 && last >= 0x80) refuse(1, "a letter outside ASCII inside (?i:...)");
        previous = 0;
        continue;
      }
      previous = escaped ? escape(true) : take();
      if (previous != 0) check_range(previous, previous);
      const bool plain = previous != 0 && previous < 0x80;
      if (ignore_case_depth_ > 0 && !plain) refuse(1, "more than ASCII letters in a class inside (?i:...)");
    }
    take();
  }

  void open_group() {
    take();
    bool ignore_case = false;
    if (peek() == '?') {
      if (starts("?:") || starts("?=") || starts("?!") || starts("?>")) position_ += 2;
      else if ((ignore_case = starts("?i:"))) position_ += 3;
      else refuse(3, "a group");
    } else if (peek() == '*') {
      refuse(2, "a verb");
    }
    groups_ += ignore_case || ignore_case_depth_ > 0 ? 'i' : ' ';
    if (groups_.back() == 'i') ++ignore_case_depth_;
  }

  void close_group() {
    if (groups_.empty()) refuse(1, "a ')' without a '('");
    if (groups_.back() == 'i') --ignore_case_depth_;
    groups_.pop_back();
    take();
  }

  // Reads {n}, {n,} and {n,m}. Refuses a '+' or '?' after the closing brace, which differs in meaning between
  // the two libraries.
  void interval() {
    const size_t begin = position_;
    take();
    const size_t close = pattern_.find('}', position_);
    const std::string_view inside = pattern_.substr(position_, close - position_);
    const bool good = close != std::string_view::npos && !inside.empty() && inside[0] >= '0' &&
                      inside[0] <= '9' && inside.find_first_not_of("0123456789,") == std::string_view::npos &&
                      std::count(inside.begin(), inside.end(), ',') <= 1;
    if (good) position_ = close + 1;
    if (!good || peek() == '+' || peek() == '?' || peek() == '*' || peek() == '{') {
      position_ = begin;
      refuse(6, "an interval");
    }
  }

  std::string_view pattern_;
  const std::string& where_;
  size_t position_ = 0;
  std::string groups_;  // groups that are not closed yet; 'i' if case is ignored in the group
  int ignore_case_depth_ = 0;
  char last_literal_ = 0;
  size_t last_literal_end_ = 0;
};

}  // namespace

void check_portable(std::string_view pattern, const std::string& where) {
  PatternChecker(pattern, where).run();
}

}  // namespace bough::unicode

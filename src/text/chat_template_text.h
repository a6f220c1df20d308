// Text operations with the behavior of Python's str: characters, case, splitting, numbers. The filters and
// methods of templates use them.
#pragma once

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat_template_value.h"

namespace bough::jinja {

using Names = std::initializer_list<std::string_view>;
using Flavour = Sequence::Flavour;
using Values = std::vector<Value>;

inline bool is_one_of(std::string_view name, Names names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

struct Character {
  char32_t code_point;
  std::string_view bytes;
};
std::vector<Character> characters_of(std::string_view text);
int64_t num_characters(std::string_view text);

bool is_white(char32_t c);  // as in str.isspace
bool is_upper(char32_t c);
bool is_lower(char32_t c);

// Python's str.strip. Strips `characters`, or white space if nullptr.
std::string strip(std::string text, bool left, bool right, const std::string* characters = nullptr);

enum class Case { kLower, kUpper, kTitle, kCapitalized, kSwapped };
// `word_goes_on` (for kTitle only): true if a character continues a word. For str.title, cased characters do;
// for the filter `title`, all characters except separators. Throws Error for characters whose case is several
// characters in Python, or depends on the context.
std::string with_case(std::string_view text, Case wanted,
                      const std::function<bool(char32_t)>& word_goes_on = {});

// Python's str.replace, str.split, str.rsplit and str.splitlines. most: the largest number of replacements or
// splits; negative: no limit.
std::string replaced(const std::string& text, const std::string& old, const std::string& by, int64_t most);
Values split(const std::string& text, const std::string& separator, int64_t most, bool from_right);
Values split_white(const std::string& text, int64_t most);
Values split_lines(const std::string& text, bool keep_ends);
// Jinja's filter `indent`: a line break at the end leaves an empty last line.
std::string indented(const std::string& text, const std::string& indent, bool first, bool blank);

// Python's int() and float() of a text; nullopt if Python would raise an error.
std::optional<int64_t> parse_integer(const std::string& given);
std::optional<double> parse_float(const std::string& given);

// Return the integer or text that an argument of the function `what` holds. Throw Error if it has another
// type.
int64_t integer_of(const Value& value, std::string_view what);
const std::string& text_of(const Value& value, std::string_view what);

}  // namespace bough::jinja

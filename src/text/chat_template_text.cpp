#include "text/chat_template_text.h"

#include <utf8proc.h>

#include <cstdlib>
#include <utility>

#include "base/error.h"
#include "text/unicode_text.h"

namespace bough::jinja {

bool is_white(char32_t c) {
  return unicode::is_white_space(c) || (c >= 0x1C && c <= 0x1F);
}

std::vector<Character> characters_of(std::string_view text) {
  std::vector<Character> out;
  for (size_t i = 0; i < text.size();) {
    const unicode::Decoded next = unicode::decode(text.substr(i));
    out.push_back({next.code_point, text.substr(i, next.length)});
    i += next.length;
  }
  return out;
}
int64_t num_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

namespace {

// True for characters whose upper or lower case is several characters in Python, or depends on the context.
bool has_special_case(char32_t c) {
  return c == 0xDF || c == 0x130 || c == 0x149 || (c >= 0x1C4 && c <= 0x1CC) || c == 0x1F0 ||
         (c >= 0x1F1 && c <= 0x1F3) || c == 0x345 || c == 0x390 || c == 0x3A3 || c == 0x3B0 || c == 0x587 ||
         (c >= 0x10D0 && c <= 0x10FF) || (c >= 0x1E96 && c <= 0x1E9E) || (c >= 0x1F50 && c <= 0x1FFC) ||
         (c >= 0xFB00 && c <= 0xFB17);
}

}  // namespace

bool is_upper(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c)) == UTF8PROC_CATEGORY_LU;
}
bool is_lower(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c)) == UTF8PROC_CATEGORY_LL;
}

std::string with_case(std::string_view text, Case wanted, const std::function<bool(char32_t)>& word_goes_on) {
  std::string out;
  bool begins = true;
  for (const auto& [c, bytes] : characters_of(text)) {
    if (has_special_case(c)) fail("upper and lower case of ", bough::quoted(bytes), " is not supported");
    const bool up = wanted == Case::kUpper || (wanted == Case::kSwapped && is_lower(c)) ||
                    ((wanted == Case::kTitle || wanted == Case::kCapitalized) && begins);
    const auto code_point = static_cast<utf8proc_int32_t>(c);
    unicode::append(out,
                    static_cast<char32_t>(up ? utf8proc_toupper(code_point) : utf8proc_tolower(code_point)));
    begins = wanted == Case::kTitle && !word_goes_on(c);
  }
  return out;
}

std::string replaced(const std::string& text, const std::string& old, const std::string& by, int64_t most) {
  std::string out;
  size_t begin = 0;
  if (old.empty()) {  // insert between all characters
    for (const auto& [c, bytes] : characters_of(text)) {
      if (most-- > 0 || most < -1) out += by;
      out += bytes;
    }
    if (most > 0 || most < 0) out += by;
    return out;
  }
  for (size_t end; most != 0 && (end = text.find(old, begin)) != std::string::npos; --most) {
    out.append(text, begin, end - begin) += by;
    begin = end + old.size();
    if (out.size() > (size_t{1} << 27)) fail("it makes a text that is too long");
  }
  return out.append(text, begin);
}

Values split_white(const std::string& text, int64_t most) {
  Values parts;
  size_t i = 0;
  const std::string_view view = text;
  while (true) {
    i = unicode::skip_white_space(view, i);
    if (i >= view.size()) return parts;
    if (most >= 0 && static_cast<int64_t>(parts.size()) == most) {
      parts.push_back(Value::text(strip(text.substr(i), false, true)));
      return parts;
    }
    size_t end = i;
    while (end < view.size()) {
      const unicode::Decoded next = unicode::decode(view.substr(end));
      if (is_white(next.code_point)) break;
      end += next.length;
    }
    parts.push_back(Value::text(text.substr(i, end - i)));
    i = end;
  }
}

Values split(const std::string& text, const std::string& separator, int64_t most, bool from_right) {
  if (separator.empty()) fail("split: the separator is empty");
  Values parts;
  if (from_right) {
    size_t end = text.size();
    for (size_t at; most != 0 && end >= separator.size() &&
                    (at = text.rfind(separator, end - separator.size())) != std::string::npos;
         --most) {
      parts.push_back(Value::text(text.substr(at + separator.size(), end - at - separator.size())));
      end = at;
    }
    parts.push_back(Value::text(text.substr(0, end)));
    std::reverse(parts.begin(), parts.end());
    return parts;
  }
  size_t begin = 0;
  for (size_t at; most != 0 && (at = text.find(separator, begin)) != std::string::npos; --most) {
    parts.push_back(Value::text(text.substr(begin, at - begin)));
    begin = at + separator.size();
  }
  parts.push_back(Value::text(text.substr(begin)));
  return parts;
}

Values split_lines(const std::string& text, bool keep_ends) {
  Values lines;
  std::string line;
  const std::vector<Character> all = characters_of(text);
  for (size_t i = 0; i < all.size(); ++i) {
    const char32_t c = all[i].code_point;
    const bool ends = c == '\n' || c == '\r' || c == 0x0B || c == 0x0C || (c >= 0x1C && c <= 0x1E) ||
                      c == 0x85 || c == 0x2028 || c == 0x2029;
    if (!ends) {
      line += all[i].bytes;
      continue;
    }
    if (keep_ends) line += all[i].bytes;
    if (c == '\r' && i + 1 < all.size() && all[i + 1].code_point == '\n') {
      ++i;
      if (keep_ends) line += '\n';
    }
    lines.push_back(Value::text(std::exchange(line, "")));
  }
  if (!line.empty()) lines.push_back(Value::text(line));
  return lines;
}

int64_t integer_of(const Value& value, std::string_view what) {
  if (!value.is_whole()) fail(what, " takes a whole number, got ", value.type_name());
  return value.as_integer();
}
const std::string& text_of(const Value& value, std::string_view what) {
  if (!value.is_text()) fail(what, " takes a string, got ", value.type_name());
  return value.as_text();
}

std::optional<int64_t> parse_integer(const std::string& given) {
  std::string text = strip(given, true, true);
  text.erase(std::remove(text.begin(), text.end(), '_'), text.end());
  const size_t sign = !text.empty() && (text[0] == '-' || text[0] == '+');
  if (text.size() == sign || text.find_first_not_of("0123456789", sign) != std::string::npos) return {};
  if (text.size() - sign > 18) fail("a whole number beyond 64 bits is not supported");
  return std::strtoll(text.c_str(), nullptr, 10);
}
std::optional<double> parse_float(const std::string& given) {
  const std::string text = strip(given, true, true);
  if (text.empty() || text.find_first_not_of("0123456789+-.eE") != std::string::npos) return {};
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  return end == text.c_str() + text.size() ? std::optional(value) : std::nullopt;
}

std::string indented(const std::string& text, const std::string& indent, bool first, bool blank) {
  const Values lines = split_lines(text + "\n", false);
  std::string out = first ? indent : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = lines[i].as_text();
    if (i > 0) out += '\n';
    if (i > 0 && (blank || !line.empty())) out += indent;
    out += line;
  }
  return out;
}

std::string strip(std::string text, bool left, bool right, const std::string* characters) {
  const auto strips = [&](std::string_view character, char32_t c) {
    return characters ? characters->find(character) != std::string::npos : is_white(c);
  };
  size_t begin = 0;
  size_t end = text.size();
  const std::string_view view = text;
  while (left && begin < end) {
    const unicode::Decoded next = unicode::decode(view.substr(begin));
    if (!strips(view.substr(begin, next.length), next.code_point)) break;
    begin += next.length;
  }
  while (right && end > begin) {
    const size_t last = unicode::character_before(view, end);
    if (!strips(view.substr(last, end - last), unicode::decode(view.substr(last)).code_point)) break;
    end = last;
  }
  return text.substr(begin, end - begin);
}

}  // namespace bough::jinja

#include "report/html_text.h"

#include <array>
#include <cstdio>

#include "base/json.h"

namespace bough {

std::string html_escape(std::string_view text) {
  // dump_line replaces invalid UTF-8, so parsing its output gives valid UTF-8.
  const std::string clean = Json::parse(dump_line(std::string(text))).get<std::string>();
  std::string out;
  out.reserve(clean.size() + clean.size() / 8);
  for (const char c : clean) {
    const auto byte = static_cast<unsigned char>(c);
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default:
        if ((byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7F) {
          // Unicode control pictures: U+2400 + code, and U+2421 for DEL.
          out += {'\xE2', '\x90', static_cast<char>(byte == 0x7F ? 0xA1 : 0x80 + byte)};
        } else {
          out += c;
        }
    }
  }
  return out;
}

std::string without_controls(std::string text, std::string_view kept) {
  for (char& c : text)
    if ((static_cast<unsigned char>(c) < 0x20 || c == 0x7F) && kept.find(c) == std::string_view::npos)
      c = ' ';
  return text;
}

std::string cut_text(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return std::string(text);
  size_t end = max_bytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return std::string(text.substr(0, end)) + "…";
}

}  // namespace bough

#include "text/chat_template_lexer.h"

#include <algorithm>
#include <charconv>
#include <cstdint>

#include "base/ascii.h"
#include "base/error.h"
#include "text/chat_template_text.h"
#include "text/unicode_text.h"

namespace bough::jinja {
namespace {

bool begins_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

class Lexer {
 public:
  Lexer(std::string_view given, const std::string& name) : name_(name) {
    for (size_t i = 0; i < given.size(); ++i) {
      if (given[i] == '\r' && i + 1 < given.size() && given[i + 1] == '\n') continue;
      source_ += given[i] == '\r' ? '\n' : given[i];
    }
    if (source_.ends_with('\n')) source_.pop_back();  // Jinja drops the last line break
  }

  std::vector<Token> run() {
    while (position_ < source_.size()) {
      const size_t tag = find_tag();
      std::string text = source_.substr(position_, tag - position_);
      if (tag == source_.size()) {
        add_text(std::move(text));
        break;
      }
      const char kind = source_[tag + 1];
      size_t after = tag + 2;
      const char mark = after < source_.size() ? source_[after] : ' ';
      const bool signs = mark == '-' || mark == '+';
      after += signs;
      trim_before_tag(text, signs ? mark : ' ', kind == '{');
      const int line_of_text = line_;
      line_ += static_cast<int>(std::count(source_.begin() + static_cast<ptrdiff_t>(position_),
                                           source_.begin() + static_cast<ptrdiff_t>(tag), '\n'));
      if (!text.empty()) tokens_.push_back({Token::Kind::kText, std::move(text), line_of_text});
      position_ = after;
      if (kind == '#') {
        skip_comment();
      } else if (kind == '%' && take_raw()) {
        // take_raw() has added the text as a token.
      } else {
        tokens_.push_back({kind == '{' ? Token::Kind::kOutputBegin : Token::Kind::kBlockBegin, "", line_});
        read_tag(kind == '{' ? "}}" : "%}");
      }
    }
    tokens_.push_back({Token::Kind::kEnd, "the end of the template", line_});
    return std::move(tokens_);
  }

 private:
  size_t find_tag() const {
    for (size_t i = position_; i + 1 < source_.size(); ++i)
      if (source_[i] == '{' && (source_[i + 1] == '{' || source_[i + 1] == '%' || source_[i + 1] == '#'))
        return i;
    return source_.size();
  }
  bool at(std::string_view text) const {
    return std::string_view(source_).substr(position_).starts_with(text);
  }

  void add_text(std::string text) {
    if (!text.empty()) tokens_.push_back({Token::Kind::kText, std::move(text), line_});
  }

  // Removes from the end of `text` what the following tag strips. '-' strips all white space. Blocks and
  // comments strip blanks on the tag's line (lstrip_blocks).
  void trim_before_tag(std::string& text, char mark, bool is_output) const {
    if (mark == '-') {
      size_t end = text.size();
      while (end > 0) {
        const size_t begin = unicode::character_before(text, end);
        if (!is_white(unicode::decode(std::string_view(text).substr(begin)).code_point)) break;
        end = begin;
      }
      text.resize(end);
    } else if (!is_output && mark != '+') {
      size_t end = text.size();
      while (end > 0 && text[end - 1] != '\n' && is_space(text[end - 1])) --end;
      if (end > 0 ? text[end - 1] == '\n' : line_starts_) text.resize(end);
    }
  }

  void skip_white_space() {
    while (position_ < source_.size()) {
      const unicode::Decoded next = unicode::decode(std::string_view(source_).substr(position_));
      if (!is_white(next.code_point)) break;
      line_ += source_[position_] == '\n';
      position_ += next.length;
    }
  }

  // If a tag ends here (`close`, after an optional mark), moves past its end. The mark '-' also skips all
  // white space after the tag. A block or comment without a mark also skips one line break (trim_blocks).
  bool take_end(std::string_view close) {
    const bool output = close == "}}";
    const char mark = source_[position_];
    const bool marked = mark == '-' || (mark == '+' && !output);
    if (!std::string_view(source_).substr(position_ + marked).starts_with(close)) return false;
    position_ += marked + close.size();
    if (marked && mark == '-') {
      skip_white_space();
    } else if (!marked && !output && position_ < source_.size() && source_[position_] == '\n') {
      ++position_;
      ++line_;
    }
    line_starts_ = source_[position_ - 1] == '\n';
    return true;
  }

  void skip_comment() {
    const int begin = line_;
    for (; position_ < source_.size(); ++position_) {
      if (take_end("#}")) return;
      line_ += source_[position_] == '\n';
    }
    refuse(name_, begin, "a comment is not closed");
  }

  // Reads {% raw %}...{% endraw %}. The first `{%` and the mark after it have been read. Returns false, and
  // reads nothing, if the tag is another one.
  bool take_raw() {
    const size_t begin = position_;
    const int begin_line = line_;
    skip_white_space();
    if (at("raw")) {
      position_ += 3;
      skip_white_space();
      if (at("-%}") || at("%}")) {
        const bool strip = at("-");
        position_ += strip ? 3 : 2;
        if (strip) skip_white_space();
        line_starts_ = source_[position_ - 1] == '\n';
        finish_raw(begin_line);
        return true;
      }
    }
    position_ = begin;
    line_ = begin_line;
    return false;
  }
  void finish_raw(int begin_line) {
    const size_t begin = position_;
    for (size_t tag = begin; (tag = source_.find("{%", tag)) != std::string::npos; ++tag) {
      position_ = tag + 2;
      const char mark = position_ < source_.size() ? source_[position_] : ' ';
      const bool signs = mark == '-' || mark == '+';
      position_ += signs;
      const int line = line_;
      skip_white_space();
      if (!at("endraw")) {
        line_ = line;
        continue;
      }
      position_ += 6;
      skip_white_space();
      std::string text = source_.substr(begin, tag - begin);
      line_ += static_cast<int>(std::count(text.begin(), text.end(), '\n'));
      trim_before_tag(text, signs ? mark : ' ', false);
      if (position_ >= source_.size() || !take_end("%}")) break;
      if (!text.empty()) tokens_.push_back({Token::Kind::kText, std::move(text), begin_line});
      return;
    }
    refuse(name_, begin_line, "a raw block is not closed");
  }

  void read_tag(std::string_view close) {
    const int begin = line_;
    std::string open;  // open brackets
    while (position_ < source_.size()) {
      const char c = source_[position_];
      if (open.empty() && take_end(close)) {
        tokens_.push_back({Token::Kind::kTagEnd, std::string(close), line_});
        return;
      }
      if (is_space(c)) {
        line_ += c == '\n';
        ++position_;
      } else if (c == '\'' || c == '"') {
        read_string(c);
      } else if (is_digit(c)) {
        read_number();
      } else if (begins_name(c)) {
        size_t end = position_;
        while (end < source_.size() && (begins_name(source_[end]) || is_digit(source_[end]))) ++end;
        add(Token::Kind::kName, end);
      } else {
        read_operator(c, open);
      }
    }
    refuse(name_, begin, "a tag is not closed");
  }

  void add(Token::Kind kind, size_t end) {
    tokens_.push_back({kind, source_.substr(position_, end - position_), line_});
    position_ = end;
  }

  void read_operator(char c, std::string& open) {
    constexpr std::string_view kOpen = "([{", kClose = ")]}";
    if (kOpen.find(c) != std::string_view::npos) {
      open += c;
    } else if (const size_t kind = kClose.find(c); kind != std::string_view::npos) {
      if (open.empty() || open.back() != kOpen[kind])
        refuse(name_, line_, str("unexpected ", bough::quoted(std::string(1, c))));
      open.pop_back();
    }
    for (const std::string_view two : {"==", "!=", "<=", ">=", "//", "**"})
      if (at(two)) return add(Token::Kind::kOperator, position_ + 2);
    if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == std::string_view::npos)
      refuse(name_, line_, str("unexpected ", bough::quoted(std::string(1, c))));
    add(Token::Kind::kOperator, position_ + 1);
  }

  void read_number() {
    const auto digits = [&](size_t i) {
      while (i < source_.size() && (is_digit(source_[i]) || (source_[i] == '_' && i + 1 < source_.size() &&
                                                             is_digit(source_[i + 1]))))
        ++i;
      return i;
    };
    if (source_[position_] == '0' && position_ + 1 < source_.size() &&
        std::string_view("xXoObB").find(source_[position_ + 1]) != std::string_view::npos)
      refuse(name_, line_, "a number that is not decimal is not supported");
    size_t end = digits(position_);
    bool is_float = false;
    if (end + 1 < source_.size() && source_[end] == '.' && is_digit(source_[end + 1])) {
      is_float = true;
      end = digits(end + 1);
    }
    if (end + 1 < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      const size_t sign = source_[end + 1] == '+' || source_[end + 1] == '-' ? 1 : 0;
      if (end + 1 + sign < source_.size() && is_digit(source_[end + 1 + sign])) {
        is_float = true;
        end = digits(end + 1 + sign);
      }
    }
    add(is_float ? Token::Kind::kFloat : Token::Kind::kInteger, end);
    std::string& text = tokens_.back().text;
    text.erase(std::remove(text.begin(), text.end(), '_'), text.end());
  }

  // Reads a string with Python's escapes. An unknown escape such as \q stays in the string unchanged.
  void read_string(char quote) {
    const int begin = line_;
    std::string out;
    size_t i = position_ + 1;
    for (; i < source_.size() && source_[i] != quote; ++i) {
      line_ += source_[i] == '\n';
      if (source_[i] != '\\') {
        out += source_[i];
        continue;
      }
      if (++i == source_.size()) break;
      const char c = source_[i];
      constexpr std::string_view kEscapes = "ntr\\'\"abfv";
      const int digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
      if (const size_t index = kEscapes.find(c); index != std::string_view::npos) {
        out += "\n\t\r\\'\"\a\b\f\v"[index];
      } else if (c == '\n') {
        ++line_;
      } else if (digits > 0) {
        append_code_point(out, std::string_view(source_).substr(i + 1, static_cast<size_t>(digits)), digits,
                          16);
        i += static_cast<size_t>(digits);
      } else if (c >= '0' && c <= '7') {
        size_t end = i;
        while (end < i + 3 && end < source_.size() && source_[end] >= '0' && source_[end] <= '7') ++end;
        append_code_point(out, std::string_view(source_).substr(i, end - i), static_cast<int>(end - i), 8);
        i = end - 1;
      } else if (c == 'N') {
        refuse(name_, line_, "the escape \\N is not supported");
      } else {
        (out += '\\') += c;
      }
    }
    if (i >= source_.size()) refuse(name_, begin, "a string is not closed");
    position_ = i + 1;
    tokens_.push_back({Token::Kind::kString, std::move(out), begin});
  }

  void append_code_point(std::string& out, std::string_view text, int length, int base) {
    uint32_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
    if (error != std::errc() || end != text.data() + length || number > 0x10FFFF ||
        (number >= 0xD800 && number < 0xE000))
      refuse(name_, line_, "an escape in a string is invalid");
    unicode::append(out, number);
  }

  const std::string& name_;
  std::string source_;
  std::vector<Token> tokens_;
  size_t position_ = 0;
  int line_ = 1;
  bool line_starts_ = true;
};

}  // namespace

std::vector<Token> tokens_of(std::string_view source, const std::string& name) {
  return Lexer(source, name).run();
}

void refuse(const std::string& name, int line, const std::string& what) {
  throw UserError(str(name, ":", line, ": chat template: ", what));
}

}  // namespace bough::jinja

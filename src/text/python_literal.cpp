#include "text/python_literal.h"

#include <cctype>
#include <charconv>
#include <cstdint>

#include "base/error.h"
#include "text/chat_template_value.h"

namespace bough {
namespace {

using jinja::fail;

class PythonReader {
 public:
  explicit PythonReader(std::string_view text) : text_(text) {}

  std::vector<PythonCall> calls() {
    std::vector<PythonCall> calls;
    const bool list = take('[');
    while (skip(), position_ < text_.size() && !(list && peek() == ']')) {
      calls.push_back(call());
      take(',');
    }
    if (list && !take(']')) fail("a list of calls is not closed");
    skip();
    if (position_ != text_.size()) fail("unexpected text after the calls");
    if (calls.empty()) fail("the list has no calls");
    return calls;
  }

  OrderedJson literal() {
    OrderedJson read = value(0);
    skip();
    if (position_ != text_.size()) fail("unexpected text after a literal");
    return read;
  }

 private:
  char peek() const { return position_ < text_.size() ? text_[position_] : '\0'; }
  void skip() {
    while (position_ < text_.size() && (peek() == ' ' || (peek() >= '\t' && peek() <= '\r'))) ++position_;
  }
  bool take(char c) {
    skip();
    const bool found = peek() == c;
    position_ += found;
    return found;
  }
  std::string word() {
    skip();
    const size_t begin = position_;
    while (std::isalnum(static_cast<unsigned char>(peek())) || peek() == '_' || peek() == '.' ||
           (position_ > begin && peek() == '-'))
      ++position_;
    return std::string(text_.substr(begin, position_ - begin));
  }

  PythonCall call() {
    PythonCall result{word(), OrderedJson::object()};
    if (result.name.empty()) fail("the call has no name");
    if (!take('(')) fail("expected '(' after a name");
    while (!take(')')) {
      const std::string key = word();
      if (key.empty() || !take('=')) fail("an argument has no name");
      result.arguments[key] = value(0);
      if (!take(',') && (skip(), peek() != ')')) fail("the arguments are not closed");
    }
    return result;
  }

  OrderedJson value(int depth) {
    if (depth > 100) fail("arguments are nested too deeply");
    skip();
    const char c = peek();
    if (c == '"' || c == '\'') return string(c);
    if (take('[')) return items(']', depth);
    if (take('(')) return items(')', depth);
    if (take('{')) {
      OrderedJson object = OrderedJson::object();
      while (!take('}')) {
        const OrderedJson key = value(depth + 1);
        if (!key.is_string() || !take(':')) fail("a dict is malformed");
        if (object.contains(key.get<std::string>()))
          fail("the key ", quoted(key.get<std::string>(), 40), " occurs twice");
        object[key.get<std::string>()] = value(depth + 1);
        if (!take(',') && (skip(), peek() != '}')) fail("a dict is not closed");
      }
      return object;
    }
    const size_t begin = position_;
    while (std::isalnum(static_cast<unsigned char>(peek())) || peek() == '.' || peek() == '-' ||
           peek() == '+')
      ++position_;
    const std::string_view text = text_.substr(begin, position_ - begin);
    if (text == "True" || text == "true") return true;
    if (text == "False" || text == "false") return false;
    if (text == "None" || text == "null") return nullptr;
    if (text.empty() || text.find_first_not_of("0123456789.-+eE") != std::string_view::npos)
      fail("an argument is not a literal");
    try {
      return parse_ordered_json(text, "the call");
    } catch (const UserError& error) {
      fail(error.what());
    }
  }
  OrderedJson items(char close, int depth) {
    OrderedJson list = OrderedJson::array();
    while (!take(close)) {
      list.push_back(value(depth + 1));
      if (!take(',') && (skip(), peek() != close)) fail("a list is not closed");
    }
    return list;
  }
  OrderedJson string(char quote) {
    std::string out;
    for (++position_; position_ < text_.size() && peek() != quote; ++position_) {
      if (peek() != '\\') {
        out += peek();
        continue;
      }
      ++position_;
      if (const size_t digits = peek() == 'x' ? 2 : peek() == 'u' ? 4 : peek() == 'U' ? 8 : 0; digits > 0) {
        append_code_point(out, text_.substr(position_ + 1, digits), digits);
        position_ += digits;
        continue;
      }
      constexpr std::string_view kEscapes = "ntr\\'\"0";
      const size_t index = kEscapes.find(peek());
      if (index != std::string_view::npos && peek() != '\0')
        out += std::string_view("\n\t\r\\'\"\0", 7)[index];
      else (out += '\\') += peek();
    }
    if (position_ >= text_.size()) fail("a string is not closed");
    ++position_;
    return out;
  }

  static void append_code_point(std::string& out, std::string_view digits, size_t expected) {
    uint32_t code = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (error != std::errc() || end != digits.data() + expected || code > 0x10FFFF || (code >> 11) == 0x1B)
      fail("a string has a malformed escape");
    if (code < 0x80) {
      out += static_cast<char>(code);
      return;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    out += static_cast<char>((0xFF00 >> (more + 1)) | (code >> (6 * more)));
    for (int i = more - 1; i >= 0; --i) out += static_cast<char>(0x80 | ((code >> (6 * i)) & 0x3F));
  }

  std::string_view text_;
  size_t position_ = 0;
};

}  // namespace

OrderedJson read_python_literal(std::string_view text) {
  return PythonReader(text).literal();
}

std::vector<PythonCall> read_python_calls(std::string_view text) {
  return PythonReader(text).calls();
}

}  // namespace bough

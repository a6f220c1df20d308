#include "env/math_tokens.h"

#include <algorithm>
#include <utility>

#include "base/ascii.h"

namespace bough {

namespace {

constexpr std::pair<std::string_view, char> kCommandMarks[] = {
    {"cdot", '*'},     {"times", '*'},      {"ast", '*'},    {"div", '/'},      {"pm", 'P'},
    {"mp", 'M'},       {"cup", 'U'},        {"infty", 'I'},  {"le", 'l'},       {"leq", 'l'},
    {"leqslant", 'l'}, {"ge", 'g'},         {"geq", 'g'},    {"geqslant", 'g'}, {"lt", '<'},
    {"gt", '>'},       {"in", 'E'},         {"frac", 'F'},   {"dfrac", 'F'},    {"tfrac", 'F'},
    {"cfrac", 'F'},    {"sqrt", 'Q'},       {"binom", 'B'},  {"dbinom", 'B'},   {"tbinom", 'B'},
    {"emptyset", '0'}, {"varnothing", '0'}, {"lbrace", 'S'}, {"rbrace", 's'},   {"vert", '|'},
    {"lvert", '|'},    {"rvert", '|'},      {"mid", '|'},    {"lbrack", '['},   {"rbrack", ']'},
    {"eq", '='},       {"over", '/'},       {"langle", '('}, {"rangle", ')'}};

constexpr std::string_view kDropped[] = {"left",         "right",     "big",       "Big",   "bigg",   "Bigg",
                                         "bigl",         "bigr",      "Bigl",      "Bigr",  "quad",   "qquad",
                                         "displaystyle", "textstyle", "limits",    "circ",  "degree", "dots",
                                         "hspace",       "mathopen",  "mathclose", "boxed", "fbox"};

constexpr std::string_view kTextCommands[] = {"text",         "textbf", "textit",    "textrm", "textup",
                                              "mathrm",       "mathbf", "mbox",      "rm",     "bf",
                                              "operatorname", "mathit", "textnormal"};

constexpr std::string_view kFunctions[] = {"sin",    "cos",  "tan",  "cot",  "sec", "csc",    "sinh",
                                           "cosh",   "tanh", "ln",   "log",  "exp", "arcsin", "arccos",
                                           "arctan", "asin", "acos", "atan", "abs"};

constexpr std::pair<std::string_view, std::string_view> kUtf8[] = {{"\xE2\x88\x92", "-"},
                                                                   {"\xE2\x80\x93", "-"},
                                                                   {"\xC3\x97", "*"},
                                                                   {"\xC2\xB7", "*"},
                                                                   {"\xC3\xB7", "/"},
                                                                   {"\xCF\x80", "\\pi "},
                                                                   {"\xE2\x88\x9E", "\\infty "},
                                                                   {"\xC2\xB1", "\\pm "},
                                                                   {"\xE2\x89\xA4", "\\le "},
                                                                   {"\xE2\x89\xA5", "\\ge "},
                                                                   {"\xE2\x88\xAA", "\\cup "},
                                                                   {"\xC2\xB0", " "},
                                                                   {"\xC2\xB2", "^2"},
                                                                   {"\xC2\xB3", "^3"},
                                                                   {"\xC2\xA0", " "},
                                                                   {"\xE2\x88\x85", "\\emptyset "},
                                                                   {"\xE2\x88\x9A", "sqrt "},
                                                                   {"\xE2\x82\xAC", " "},
                                                                   {"\xC2\xA3", " "},
                                                                   {"\xE2\x88\x88", "\\in "},
                                                                   {"\xE2\x88\x9E", "\\infty "}};

template <class List>
bool contains(const List& list, std::string_view word) {
  return std::find(std::begin(list), std::end(list), word) != std::end(list);
}

class Lexer {
 public:
  explicit Lexer(std::string_view text) {
    for (size_t i = 0; i < text.size();) {
      size_t length = 1;
      std::string_view as = text.substr(i, 1);
      if (constexpr std::string_view kDegrees = "^{\\circ}"; text.substr(i, kDegrees.size()) == kDegrees) {
        as = " ";
        length = kDegrees.size();
      }
      if (static_cast<unsigned char>(text[i]) >= 0x80) {
        for (const auto& [bytes, plain] : kUtf8) {
          if (text.substr(i, bytes.size()) != bytes) continue;
          as = plain;
          length = bytes.size();
          break;
        }
      }
      text_ += as;
      i += length;
    }
  }

  std::vector<Token> tokens() {
    while (at_ < text_.size()) next();
    tokens_.push_back({TokenKind::kEnd, "", true});
    return std::move(tokens_);
  }

 private:
  std::string_view rest() const { return std::string_view(text_).substr(at_); }
  char peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }

  void add(TokenKind kind, std::string text) {
    tokens_.push_back({kind, std::move(text), std::exchange(space_, false)});
  }
  void mark(char c) { add(TokenKind::kMark, std::string(1, c)); }
  void space() { space_ = true; }
  char last_mark() const {
    return !tokens_.empty() && tokens_.back().kind == TokenKind::kMark ? tokens_.back().text[0] : '\0';
  }

  // Returns the content of the braces that open at position at_. If none opens, the next character.
  std::string braced() {
    while (peek() == ' ') ++at_;
    if (peek() != '{') {
      if (peek() == '\0') throw UnreadableFormula();
      return std::string(1, text_[at_++]);
    }
    size_t depth = 0;
    for (size_t end = at_; end < text_.size(); ++end) {
      if (text_[end] == '{') ++depth;
      if (text_[end] == '}' && --depth == 0) {
        std::string inside = text_.substr(at_ + 1, end - at_ - 1);
        at_ = end + 1;
        return inside;
      }
    }
    throw UnreadableFormula();
  }

  void next() {
    const char c = peek();
    if (c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '~' || c == '$') {
      ++at_;
      return space();
    }
    if (is_digit(c) || (c == '.' && is_digit(peek(1)))) return number();
    if (is_letter(c)) return letters();
    if (c == '\\') return command();
    ++at_;
    if (c == '*' && peek() == '*') {
      ++at_;
      return mark('^');
    }
    if ((c == '<' || c == '>') && peek() == '=') {
      ++at_;
      return mark(c == '<' ? 'l' : 'g');
    }
    if (c == '=' && peek() == '=') ++at_;
    if (c == ';') return mark(',');
    if (c == '.' && trimmed(rest()).empty()) return space();  // the period at the end of a sentence
    if (c == '(' || c == '[' || (c == '{' && tokens_.empty())) ++brackets_;
    if ((c == ')' || c == ']') && brackets_ > 0) --brackets_;
    static constexpr std::string_view kMarks = "+-*/^_!%|()[]{},&=<>";
    if (kMarks.find(c) == std::string_view::npos) throw UnreadableFormula();
    mark(c);
  }

  // Exactly three digits at `at`.
  bool group_at(size_t at) const {
    const std::string_view group = std::string_view(text_).substr(std::min(at, text_.size()), 4);
    return group.size() >= 3 && is_digit(group[0]) && is_digit(group[1]) && is_digit(group[2]) &&
           (group.size() == 3 || !is_digit(group[3]));
  }

  // Reads a number: digits with separated thousands, a fraction, an exponent. A comma separates thousands
  // only outside of brackets. Inside brackets it separates items.
  void number() {
    std::string digits;
    const auto take_digits = [&] {
      while (is_digit(peek())) digits += text_[at_++];
    };
    take_digits();
    for (bool grouped = !digits.empty() && digits.size() <= 3; grouped;) {
      grouped = false;
      for (const std::string_view between : {"{,}", ",\\!", "\\,", "\\!", ",", " "}) {
        if (!rest().starts_with(between) || !group_at(at_ + between.size())) continue;
        if (between == "," && brackets_ > 0) continue;
        if (between == " ") {  // "3 125/250" is a mixed number
          const size_t after = at_ + 4;
          if (after < text_.size() && text_[after] == '/') continue;
        }
        at_ += between.size();
        take_digits();
        grouped = true;
        break;
      }
    }
    if (peek() == '.' && is_digit(peek(1))) {
      digits += text_[at_++];
      take_digits();
    } else if (peek() == '.' && !trimmed(rest().substr(1)).empty() && !is_letter(peek(1))) {
      ++at_;  // "3." before an operator
    }
    if (peek() == 'e' || peek() == 'E') {
      const size_t sign = peek(1) == '-' || peek(1) == '+' ? 1 : 0;
      if (is_digit(peek(1 + sign))) {
        digits += 'e';
        ++at_;
        if (sign != 0) {
          if (peek() == '-') digits += '-';
          ++at_;
        }
        take_digits();
      }
    }
    add(TokenKind::kNumber, digits);
  }

  void word(const std::string& word) {
    if (contains(kFunctions, word)) return add(TokenKind::kFunction, word);
    if (word == "sqrt") return mark('Q');
    if (word == "pi") return add(TokenKind::kSymbol, word);
    if (word == "inf" || word == "infinity" || word == "infty" || word == "oo") return mark('I');
    if (word == "or" || word == "and") return mark(',');
    if (word.size() == 1) return add(TokenKind::kSymbol, word);
    if (word == "U" || word == "union") return mark('U');
    static constexpr std::string_view kUnits[] = {
        "cm", "mm", "km",  "kg",  "mg",  "ft",  "in",  "hr",  "yd",  "mi", "lb",  "oz", "ml",
        "mL", "Hz", "mph", "min", "sec", "deg", "rad", "gal", "USD", "no", "yes", "is"};
    const bool after_value =
        !tokens_.empty() && (space_ || contains(kUnits, word)) &&
        (tokens_.back().kind == TokenKind::kNumber || tokens_.back().kind == TokenKind::kWord ||
         last_mark() == '}' || last_mark() == ')');
    if (word.size() <= 3 && !after_value && !contains(kUnits, word)) {
      for (const char c : word) add(TokenKind::kSymbol, std::string(1, c));
      return;
    }
    add(TokenKind::kWord, word);
  }

  void letters() {
    size_t end = at_;
    while (end < text_.size() && is_letter(text_[end])) ++end;
    const std::string letters = text_.substr(at_, end - at_);
    at_ = end;
    word(letters);
  }

  void command() {
    ++at_;
    const char c = peek();
    if (!is_letter(c)) {
      ++at_;
      if (c == '{') ++brackets_;
      if (c == '}' && brackets_ > 0) --brackets_;
      switch (c) {
        case '{': return mark('S');
        case '}': return mark('s');
        case '%': return mark('%');
        case '|': return mark('|');
        case '\\': return mark('N');
        case ',':
        case '!':
        case ';':
        case ':':
        case ' ':
        case '$':
        case '(':
        case ')':
        case '[':
        case ']': return space();
        default: throw UnreadableFormula();
      }
    }
    size_t end = at_;
    while (end < text_.size() && is_letter(text_[end])) ++end;
    std::string name = text_.substr(at_, end - at_);
    at_ = end;
    for (const auto& [command, c] : kCommandMarks) {
      if (name != command) continue;
      if (c == 'S' || c == '(') ++brackets_;
      if ((c == 's' || c == ')') && brackets_ > 0) --brackets_;
      return mark(c);
    }
    if (contains(kDropped, name)) {
      if ((name == "circ" || name == "degree") && last_mark() == '^') tokens_.pop_back();
      if (name == "left" && peek() == '.') ++at_;
      if (name == "right" && peek() == '.') ++at_;
      return space();
    }
    if (name == "begin" || name == "end") {
      const std::string what = braced();
      if (what != "pmatrix" && what != "bmatrix" && what != "matrix") throw UnreadableFormula();
      brackets_ += name == "begin" ? 1 : -1;
      return mark(name == "begin" ? 'b' : 'e');
    }
    if (name == "mathbb") {
      if (braced() != "R") throw UnreadableFormula();
      return mark('R');
    }
    if (contains(kTextCommands, name)) {
      std::string inside(trimmed(braced()));
      if (inside == "e" || inside == "i") return add(TokenKind::kSymbol, inside);  // upright constants
      if (inside.size() >= 3 && inside.front() == '(' && inside.back() == ')')
        inside = inside.substr(1, inside.size() - 2);
      if (inside == "or" || inside == "and") return mark(',');
      if (contains(kFunctions, inside) || inside == "pi") return word(inside);
      const bool numeric = !inside.empty() && std::all_of(inside.begin(), inside.end(), [](char x) {
        return is_digit(x) || x == ',' || x == '.' || x == '-';
      });
      if (numeric) {  // \textbf{42}
        text_.insert(at_, inside);
        return;
      }
      return add(TokenKind::kText, inside);
    }
    if (contains(kFunctions, name)) return add(TokenKind::kFunction, name);
    static constexpr std::string_view kGreek[] = {
        "pi",    "alpha", "beta",  "gamma", "delta", "epsilon", "theta", "lambda", "mu",
        "nu",    "rho",   "sigma", "tau",   "phi",   "omega",   "ell",   "varphi", "varepsilon",
        "Delta", "Omega", "xi",    "eta",   "zeta",  "kappa",   "psi",   "chi"};
    if (contains(kGreek, name)) return add(TokenKind::kSymbol, name);
    throw UnreadableFormula();
  }

  std::string text_;
  size_t at_ = 0;
  bool space_ = false;
  int brackets_ = 0;
  std::vector<Token> tokens_;
};

}  // namespace

std::string lower_words(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool space = c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '~';
    if (!space) out += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    else if (!out.empty() && out.back() != ' ') out += ' ';
  }
  while (!out.empty() && (out.back() == ' ' || out.back() == '.')) out.pop_back();
  return out;
}

std::vector<Token> formula_tokens(std::string_view text) {
  return Lexer(text).tokens();
}

}  // namespace bough

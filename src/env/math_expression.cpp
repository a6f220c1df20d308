#include "env/math_expression.h"

#include <algorithm>
#include <utility>

#include "base/ascii.h"
#include "env/math_tokens.h"

namespace bough {

namespace {

using Kind = Expression::Kind;

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  Expression answer() {
    while (mark(0, ',')) ++at_;
    if (const auto text = all_text()) return *text;
    if (tokens_.size() == 4 && std::all_of(tokens_.begin(), tokens_.end() - 1, [&](const Token& token) {
          return token.kind == TokenKind::kSymbol && token.text.size() == 1 &&
                 (&token == &tokens_[0] || !token.space_before);
        }))  // three adjacent letters are a word and no product: "cat" is not equal to "act"
      return make(Kind::kText, lower_words(tokens_[0].text + tokens_[1].text + tokens_[2].text));
    std::vector<Expression> items = list();
    if (peek().kind != TokenKind::kEnd) throw UnreadableFormula();
    Expression whole = items.size() == 1 ? std::move(items[0]) : make(Kind::kSet, "", std::move(items));
    whole.percent = percent_;
    return whole;
  }

 private:
  const Token& peek(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  bool mark(size_t ahead, char c) const {
    return peek(ahead).kind == TokenKind::kMark && peek(ahead).text[0] == c;
  }
  bool accept(char c) {
    if (!mark(0, c)) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) throw UnreadableFormula();
  }

  Expression make(Kind kind, std::string text, std::vector<Expression> children = {}) {
    if (++nodes_ > kMaxExpressionNodes) throw UnreadableFormula();
    Expression made;
    made.kind = kind;
    made.text = std::move(text);
    made.children = std::move(children);
    return made;
  }
  Expression make(Kind kind, Expression one) {
    std::vector<Expression> children;
    children.push_back(std::move(one));
    return make(kind, "", std::move(children));
  }
  Expression make(Kind kind, Expression one, Expression two, std::string text = "") {
    std::vector<Expression> children;
    children.push_back(std::move(one));
    children.push_back(std::move(two));
    return make(kind, std::move(text), std::move(children));
  }

  struct Deeper {  // one level of nesting
    explicit Deeper(int& depth) : depth_(depth) {
      if (++depth_ > kMaxExpressionDepth) {
        --depth_;
        throw UnreadableFormula();
      }
    }
    ~Deeper() { --depth_; }
    int& depth_;
  };

  // Reads an expression that has only words.
  std::optional<Expression> all_text() {
    std::string text;
    for (const Token& token : tokens_) {
      if (token.kind == TokenKind::kEnd) break;
      const bool word = token.kind == TokenKind::kWord || token.kind == TokenKind::kText;
      if (!word && (token.kind != TokenKind::kSymbol || tokens_.size() < 4 || !token.space_before))
        return std::nullopt;
      text += (text.empty() ? "" : " ") + token.text;
    }
    if (text.empty()) return std::nullopt;
    if (text.size() == 1) return make(Kind::kSymbol, text);
    return make(Kind::kText, lower_words(text));
  }

  std::vector<Expression> list() {
    std::vector<Expression> items;
    do {
      while (accept(',')) {  // "1, 2, and 3"
      }
      items.push_back(relation());
    } while (mark(0, ','));
    return items;
  }

  Expression relation() {
    const Deeper deeper(depth_);
    std::vector<Expression> sides;
    sides.push_back(unions());
    std::string operators;
    for (;;) {
      if (accept('E')) {  // x in S is read as S
        sides.clear();
        operators.clear();
        sides.push_back(unions());
        continue;
      }
      const char c = peek().kind == TokenKind::kMark ? peek().text[0] : '\0';
      if (c != '=' && c != '<' && c != '>' && c != 'l' && c != 'g') break;
      ++at_;
      operators += c;
      sides.push_back(unions());
    }
    if (operators.empty()) return std::move(sides[0]);
    return make(Kind::kRelation, operators, std::move(sides));
  }

  Expression unions() {
    std::vector<Expression> parts;
    do parts.push_back(sum());
    while (accept('U'));
    if (parts.size() == 1) return std::move(parts[0]);
    return make(Kind::kUnion, "", std::move(parts));
  }

  Expression sum() {
    const Deeper deeper(depth_);
    std::vector<Expression> terms;
    for (bool first = true;; first = false) {
      int signs = 0;
      char last = '\0';
      bool negative = false;
      while (mark(0, '+') || mark(0, '-') || mark(0, 'P') || mark(0, 'M')) {
        last = peek().text[0];
        negative ^= last == '-';
        ++at_;
        if (++signs > 3) throw UnreadableFormula();
      }
      if (!first && signs == 0) break;
      Expression term = product();
      if (last == 'P' || last == 'M') {
        term = make(Kind::kPlusMinus, std::move(term));
        term.sign = last == 'P' ? 1 : -1;
      }
      terms.push_back(negative ? make(Kind::kNegate, std::move(term)) : std::move(term));
    }
    if (terms.size() == 1) return std::move(terms[0]);
    return make(Kind::kSum, "", std::move(terms));
  }

  bool begins_factor() const {
    const Token& token = peek();
    if (token.kind == TokenKind::kNumber || token.kind == TokenKind::kSymbol ||
        token.kind == TokenKind::kFunction)
      return true;
    return token.kind == TokenKind::kMark &&
           std::string_view("([{SFQBI").find(token.text[0]) != std::string_view::npos;
  }

  // The letter x as a times sign: 3 x 10^5.
  bool is_times_letter() const {
    return peek().kind == TokenKind::kSymbol && peek().text == "x" && at_ > 0 &&
           tokens_[at_ - 1].kind == TokenKind::kNumber && peek(1).kind == TokenKind::kNumber &&
           peek(1).text == "10" && mark(2, '^');
  }

  Expression product() {
    const Deeper deeper(depth_);
    Expression left = factor();
    for (;;) {
      if (accept('*') || is_times_letter()) {
        if (peek().kind == TokenKind::kSymbol && peek().text == "x" && is_times_letter()) ++at_;
        left = make(Kind::kProduct, std::move(left), signed_factor());
      } else if (mark(0, '/')) {
        ++at_;
        left = make(Kind::kQuotient, std::move(left), signed_factor());
        drop_units();
      } else if (begins_factor()) {
        // Two adjacent numbers are not a product.
        if (peek().kind == TokenKind::kNumber && tokens_[at_ - 1].kind == TokenKind::kNumber)
          throw UnreadableFormula();
        left = make(Kind::kProduct, std::move(left), factor());
      } else {
        return left;
      }
      if (left.children[0].kind == Kind::kText || left.children[1].kind == Kind::kText)
        throw UnreadableFormula();
    }
  }

  Expression signed_factor() {
    if (accept('-')) return make(Kind::kNegate, factor());
    accept('+');
    return factor();
  }

  Expression factor() {
    const Deeper deeper(depth_);
    Expression base = primary();
    for (;;) {
      if (accept('!')) {
        base = make(Kind::kFunction, "factorial", one(std::move(base)));
      } else if (accept('%')) {
        percent_ = true;
      } else if (accept('^')) {
        base = make(Kind::kPower, std::move(base), exponent());
      } else {
        break;
      }
    }
    constexpr std::pair<std::string_view, std::string_view> kScales[] = {{"hundred", "1e2"},
                                                                         {"thousand", "1e3"},
                                                                         {"million", "1e6"},
                                                                         {"billion", "1e9"},
                                                                         {"trillion", "1e12"}};
    for (const auto& [scale, value] : kScales) {
      if ((peek().kind != TokenKind::kWord && peek().kind != TokenKind::kText) || peek().text != scale)
        continue;
      ++at_;
      base = make(Kind::kProduct, std::move(base), make(Kind::kNumber, std::string(value)));
    }
    if (peek().kind == TokenKind::kWord && peek().text == "percent") {
      ++at_;
      percent_ = true;
    }
    drop_units();
    return base;
  }

  static std::vector<Expression> one(Expression expression) {
    std::vector<Expression> children;
    children.push_back(std::move(expression));
    return children;
  }

  // Skips units after a value: "cm", "\text{ m}^2", "miles per hour", "km/h".
  void drop_units() {
    const auto unit = [&](size_t ahead) {
      return peek(ahead).kind == TokenKind::kWord || peek(ahead).kind == TokenKind::kText;
    };
    if (!unit(0)) return;
    // Words for a number or an operation are not units.
    static constexpr std::string_view kMeaning[] = {
        "not",    "dozen",   "dozens",   "squared", "cubed",   "half",    "halves",     "third",
        "thirds", "quarter", "quarters", "fourths", "fifths",  "tenths",  "hundredths", "thousandths",
        "times",  "plus",    "minus",    "over",    "less",    "more",    "than",       "factorial",
        "lakh",   "crore",   "twice",    "thrice",  "million", "billion", "thousand",   "hundred"};
    for (size_t ahead = 0; unit(ahead); ++ahead) {
      const std::string words = " " + lower_words(peek(ahead).text) + " ";
      for (const std::string_view meaning : kMeaning)
        if (words.find(" " + std::string(meaning) + " ") != std::string::npos) throw UnreadableFormula();
    }
    while (unit(0) || (mark(0, '/') && (unit(1) || peek(1).kind == TokenKind::kSymbol))) {
      at_ += unit(0) ? 1 : 2;
      if (mark(0, '^')) {
        ++at_;
        exponent();
      }
    }
  }

  Expression exponent() {
    if (accept('-')) return make(Kind::kNegate, exponent());
    if (accept('+')) return exponent();
    const Deeper deeper(depth_);
    Expression power =
        peek().kind == TokenKind::kNumber ? make(Kind::kNumber, tokens_[at_++].text) : primary();
    if (accept('^')) return make(Kind::kPower, std::move(power), exponent());  // right-associative
    return power;
  }

  // The argument of \frac and \sqrt: an expression in braces, one digit, or one symbol.
  Expression argument() {
    if (mark(0, '{')) return primary();
    if (peek().kind == TokenKind::kNumber && peek().text.size() > 1) {
      Token& token = tokens_[at_];
      if (!is_digit(token.text[0]) || token.text.find_first_not_of("0123456789") != std::string::npos)
        throw UnreadableFormula();
      const std::string first = token.text.substr(0, 1);
      token.text.erase(0, 1);
      return make(Kind::kNumber, first);
    }
    return primary();
  }

  bool is_integer(const Expression& expression) const {
    return expression.kind == Kind::kNumber &&
           expression.text.find_first_not_of("0123456789") == std::string::npos;
  }

  Expression number() {
    Expression value = make(Kind::kNumber, tokens_[at_++].text);
    if (mark(0, '_')) throw UnreadableFormula();  // a number in another base
    if (!is_integer(value)) return value;
    // Mixed numbers: 3 1/2 and 3\frac{1}{2}.
    const auto plain = [&](size_t ahead) {
      return peek(ahead).kind == TokenKind::kNumber &&
             peek(ahead).text.find_first_not_of("0123456789") == std::string::npos;
    };
    if (plain(0) && peek().space_before && mark(1, '/') && plain(2)) {
      Expression above = make(Kind::kNumber, peek().text), below = make(Kind::kNumber, peek(2).text);
      at_ += 3;
      return make(Kind::kSum, std::move(value), make(Kind::kQuotient, std::move(above), std::move(below)));
    }
    if (mark(0, 'F')) {
      const size_t before = at_;
      const std::vector<Token> tokens = tokens_;
      Expression fraction = primary();
      if (is_integer(fraction.children[0]) && is_integer(fraction.children[1]))
        return make(Kind::kSum, std::move(value), std::move(fraction));
      at_ = before;
      tokens_ = tokens;
    }
    return value;
  }

  Expression symbol() {
    std::string name = tokens_[at_++].text;
    if (accept('_')) {
      name += '_';
      if (accept('{')) {
        while (!accept('}')) {
          if (peek().kind == TokenKind::kEnd) throw UnreadableFormula();
          name += tokens_[at_++].text;
        }
      } else if (peek().kind == TokenKind::kNumber || peek().kind == TokenKind::kSymbol) {
        name += tokens_[at_++].text;
      } else {
        throw UnreadableFormula();
      }
    }
    return make(Kind::kSymbol, name);
  }

  Expression function() {
    std::string name = tokens_[at_++].text;
    if (name == "asin" || name == "acos" || name == "atan") name = "arc" + name.substr(1);
    std::optional<Expression> base, power;
    for (;;) {
      if (!base && name == "log" && accept('_')) base = argument();
      else if (!power && accept('^')) power = exponent();
      else break;
    }
    std::vector<Expression> arguments;
    if (mark(0, '(') || mark(0, '{') || mark(0, '[')) {
      arguments.push_back(primary());
    } else {  // sin 2x
      if (!begins_factor() && !mark(0, '|')) throw UnreadableFormula();
      Expression argument = factor();
      while (begins_factor() && peek().kind != TokenKind::kFunction && !mark(0, '(') && !mark(0, 'F') &&
             !mark(0, 'Q'))
        argument = make(Kind::kProduct, std::move(argument), factor());
      arguments.push_back(std::move(argument));
    }
    if (base) arguments.push_back(std::move(*base));
    if (power && power->kind == Kind::kNegate && power->children[0].text == "1") {  // sin^{-1}
      if (name != "sin" && name != "cos" && name != "tan") throw UnreadableFormula();
      return make(Kind::kFunction, "arc" + name, std::move(arguments));
    }
    Expression value = name == "exp" ? make(Kind::kPower, make(Kind::kSymbol, "e"), std::move(arguments[0]))
                                     : make(Kind::kFunction, name, std::move(arguments));
    if (power) return make(Kind::kPower, std::move(value), std::move(*power));
    return value;
  }

  Expression bracketed(char open) {
    std::vector<Expression> items = list();
    char close = ')';
    if (accept(']')) close = ']';
    else expect(')');
    if (items.size() == 1 && open == '(' && close == ')') return std::move(items[0]);
    return make(Kind::kGroup, std::string{open, close}, std::move(items));
  }

  Expression matrix() {
    std::vector<Expression> cells;
    size_t columns = 0, in_row = 0;
    for (;;) {
      cells.push_back(relation());
      ++in_row;
      if (accept('&')) continue;
      const bool more = accept('N');
      const bool end = mark(0, 'e');
      if (columns == 0) columns = in_row;
      if (in_row != columns || (!more && !end)) throw UnreadableFormula();
      in_row = 0;
      if (accept('e')) break;
    }
    Expression made = make(Kind::kMatrix, "", std::move(cells));
    made.columns = columns;
    return made;
  }

  Expression primary() {
    const Deeper deeper(depth_);
    const Token& token = peek();
    switch (token.kind) {
      case TokenKind::kNumber: return number();
      case TokenKind::kSymbol: return symbol();
      case TokenKind::kFunction: return function();
      case TokenKind::kWord:
      case TokenKind::kText: {
        std::string text = token.text;
        ++at_;
        return make(Kind::kText, lower_words(text));
      }
      case TokenKind::kEnd: throw UnreadableFormula();
      case TokenKind::kMark: break;
    }
    const char c = token.text[0];
    ++at_;
    switch (c) {
      case 'I': return make(Kind::kInfinity, "");
      case '(':
      case '[': return bracketed(c);
      case '{': {
        std::vector<Expression> items = list();
        expect('}');
        if (items.size() == 1) return std::move(items[0]);
        return make(Kind::kSet, "", std::move(items));
      }
      case 'S': {
        std::vector<Expression> items;
        if (!mark(0, 's')) items = list();
        expect('s');
        return make(Kind::kSet, "", std::move(items));
      }
      case '0': return make(Kind::kSet, "");
      case 'R': {
        Expression low = make(Kind::kNegate, make(Kind::kInfinity, ""));
        return make(Kind::kGroup, std::move(low), make(Kind::kInfinity, ""), "()");
      }
      case '|': {
        Expression inside = sum();
        expect('|');
        return make(Kind::kFunction, "abs", one(std::move(inside)));
      }
      case 'F': {
        Expression above = argument();
        return make(Kind::kQuotient, std::move(above), argument());
      }
      case 'B': {
        Expression above = argument();
        return make(Kind::kFunction, std::move(above), argument(), "binomial");
      }
      case 'Q': {
        std::optional<Expression> index;
        if (accept('[')) {
          index = sum();
          expect(']');
        }
        Expression inside = mark(0, '(') || peek().space_before ? primary() : argument();
        return make(Kind::kFunction, std::move(inside), index ? std::move(*index) : make(Kind::kNumber, "2"),
                    "root");
      }
      case 'b': return matrix();
      default: throw UnreadableFormula();
    }
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  size_t nodes_ = 0;
  bool percent_ = false;
};

}  // namespace

std::optional<Expression> parse_expression(std::string_view text) {
  if (text.size() > kMaxExpressionText) return std::nullopt;
  try {
    return Parser(formula_tokens(text)).answer();
  } catch (const UnreadableFormula&) {
    return std::nullopt;
  }
}

}  // namespace bough

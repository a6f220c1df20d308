// The parser from tokens to statements: recursive descent. Each method is a rule of jinja2's grammar.
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <initializer_list>

#include "base/error.h"
#include "text/chat_template_jinja.h"
#include "text/chat_template_lexer.h"

namespace bough::jinja {
namespace {

constexpr int kDeepest = 200;                 // levels of nesting; each parenthesis counts as three levels
constexpr int kDeepestExpression = 300;       // operators in a chain; they nest as deep as the chain is long
constexpr size_t kLongestTemplate = 1 << 20;  // bytes; templates of today's models have 1-30 kB

class Parser {
 public:
  Parser(std::vector<Token> tokens, const std::string& name) : tokens_(std::move(tokens)), name_(name) {}

  Block run() { return block({}); }

 private:
  using Kind = Expression::Kind;
  using Words = std::initializer_list<std::string_view>;

  const Token& current() const { return tokens_[position_]; }
  const Token& next() const { return tokens_[std::min(position_ + 1, tokens_.size() - 1)]; }
  static bool is(const Token& token, std::string_view text) {
    return (token.kind == Token::Kind::kName || token.kind == Token::Kind::kOperator) && token.text == text;
  }
  bool is_any(Words words) const {
    return std::any_of(words.begin(), words.end(),
                       [&](std::string_view word) { return is(current(), word); });
  }
  bool take(std::string_view text) {
    const bool found = is(current(), text);
    position_ += found;
    return found;
  }
  void expect(std::string_view text) {
    if (!take(text)) fail(str("expected ", bough::quoted(text)));
  }
  std::string take_name() {
    if (current().kind != Token::Kind::kName) fail("expected a name");
    return tokens_[position_++].text;
  }
  void end_tag() {
    if (current().kind != Token::Kind::kTagEnd) fail("expected the end of the tag");
    ++position_;
  }
  [[noreturn]] void fail(const std::string& what) const {
    refuse(name_, current().line, str(what, ", got ", bough::quoted(current().text, 40)));
  }

  struct Level {
    explicit Level(Parser& parser) : parser_(parser) {
      if (++parser.depth_ > kDeepest) refuse(parser.name_, parser.current().line, "it is nested too deeply");
    }
    ~Level() { --parser_.depth_; }
    Parser& parser_;
  };

  Expression node(Kind kind, std::string name, std::vector<Expression> operands = {}) const {
    Expression result{kind, current().line, std::move(name), std::move(operands), {}, {}};
    set_depth(result);
    return result;
  }
  void set_depth(Expression& expression) const {
    for (const Expression& operand : expression.operands)
      expression.depth = std::max(expression.depth, operand.depth + 1);
    if (expression.depth > kDeepestExpression)
      refuse(name_, expression.line, "an expression is nested too deeply");
  }
  Expression node(Kind kind, std::string name, Expression a) const {
    std::vector<Expression> operands;
    operands.push_back(std::move(a));
    return node(kind, std::move(name), std::move(operands));
  }
  Expression node(Kind kind, std::string name, Expression a, Expression b) const {
    std::vector<Expression> operands;
    operands.push_back(std::move(a));
    operands.push_back(std::move(b));
    return node(kind, std::move(name), std::move(operands));
  }
  Expression literal(Value value) const {
    Expression result = node(Kind::kLiteral, "");
    result.value = std::move(value);
    return result;
  }

  // Parses `a if b else c`. with_inline_if: false inside a statement that has an `if` of its own.
  Expression expression(bool with_inline_if = true) {
    const Level level(*this);
    Expression result = disjunction();
    while (with_inline_if && take("if")) {
      std::vector<Expression> operands;
      operands.push_back(disjunction());
      operands.push_back(std::move(result));
      if (take("else")) operands.push_back(expression());
      result = node(Kind::kInlineIf, "", std::move(operands));
    }
    return result;
  }
  Expression disjunction() {
    Expression left = conjunction();
    while (take("or")) left = node(Kind::kBinary, "or", std::move(left), conjunction());
    return left;
  }
  Expression conjunction() {
    Expression left = negation();
    while (take("and")) left = node(Kind::kBinary, "and", std::move(left), negation());
    return left;
  }
  Expression negation() {
    const Level level(*this);
    return take("not") ? node(Kind::kUnary, "not", negation()) : comparison();
  }
  Expression comparison() {
    Expression first = sum();
    std::vector<std::string> operators;
    std::vector<Expression> operands;
    while (true) {
      if (is(current(), "not") && is(next(), "in")) {
        position_ += 2;
        operators.push_back("not in");
      } else if (is_any({"==", "!=", "<", "<=", ">", ">=", "in"})) {
        operators.push_back(tokens_[position_++].text);
      } else {
        break;
      }
      operands.push_back(sum());
    }
    if (operators.empty()) return first;
    operands.insert(operands.begin(), std::move(first));
    Expression result = node(Kind::kCompare, "", std::move(operands));
    result.names = std::move(operators);
    return result;
  }
  Expression sum() { return chain({"+", "-"}, &Parser::concatenation); }
  Expression concatenation() { return chain({"~"}, &Parser::product); }
  Expression product() { return chain({"*", "/", "//", "%"}, &Parser::power); }
  Expression power() { return chain({"**"}, &Parser::filtered_unary); }
  Expression chain(Words operators, Expression (Parser::*operand)()) {
    Expression left = (this->*operand)();
    while (is_any(operators)) {
      const std::string operation = tokens_[position_++].text;
      // jinja2 makes -3 a constant, but Python computes the power first: -(3 ** 2).
      if (operation == "**" && left.kind == Kind::kUnary) fail("a power of a signed value is not supported");
      left = node(Kind::kBinary, operation, std::move(left), (this->*operand)());
    }
    return left;
  }
  Expression filtered_unary() { return filters_and_tests(unary()); }
  Expression unary() {
    const Level level(*this);
    for (const char* sign : {"-", "+"})
      if (take(sign)) return node(Kind::kUnary, sign, unary());
    return postfix(primary());
  }

  Expression primary() {
    const Token& token = current();
    if (take("(")) {
      Expression inside = tuple(true, true);
      expect(")");
      return inside;
    }
    if (take("[")) return list();
    if (take("{")) return dict();
    switch (token.kind) {
      case Token::Kind::kString: {
        std::string text;
        while (current().kind == Token::Kind::kString) text += tokens_[position_++].text;
        return literal(Value::text(std::move(text)));
      }
      case Token::Kind::kInteger: {
        int64_t number = 0;
        const std::string& digits = token.text;
        if (std::from_chars(digits.data(), digits.data() + digits.size(), number).ec != std::errc())
          fail("a whole number beyond 64 bits is not supported");
        ++position_;
        return literal(Value::integer(number));
      }
      case Token::Kind::kFloat:
        ++position_;
        return literal(Value::number(std::strtod(token.text.c_str(), nullptr)));
      case Token::Kind::kName: break;
      default: fail("unexpected syntax");
    }
    const std::string word = take_name();
    if (word == "true" || word == "True") return literal(Value::boolean(true));
    if (word == "false" || word == "False") return literal(Value::boolean(false));
    if (word == "none" || word == "None") return literal(Value::none());
    uses_caller_ |= word == "caller";
    uses_varargs_ |= word == "varargs";
    uses_kwargs_ |= word == "kwargs";
    return node(Kind::kName, word);
  }

  Expression list() {
    Expression result = node(Kind::kList, "");
    while (!take("]")) {
      result.operands.push_back(expression());
      if (!take(",") && !is(current(), "]")) fail("expected ',' or ']'");
    }
    set_depth(result);
    return result;
  }
  Expression dict() {
    Expression result = node(Kind::kDict, "");
    while (!take("}")) {
      result.operands.push_back(expression());
      expect(":");
      result.operands.push_back(expression());
      if (!take(",") && !is(current(), "}")) fail("expected ',' or '}'");
    }
    set_depth(result);
    return result;
  }

  // Parses one expression, or several separated by commas: a tuple.
  Expression tuple(bool with_inline_if, bool may_be_empty) {
    std::vector<Expression> items;
    bool is_tuple = false;
    while (!is_any({")", "in", "recursive"}) && current().kind != Token::Kind::kTagEnd) {
      items.push_back(expression(with_inline_if));
      if (!take(",")) break;
      is_tuple = true;
    }
    if (items.empty() && !may_be_empty) fail("expected an expression");
    if (items.size() == 1 && !is_tuple) return std::move(items[0]);
    return node(Kind::kTuple, "", std::move(items));
  }

  Expression postfix(Expression result) {
    while (true) {
      if (take(".")) {
        if (current().kind == Token::Kind::kInteger) {
          Expression index = literal(Value::integer(std::atoll(tokens_[position_++].text.c_str())));
          result = node(Kind::kSubscript, "", std::move(result), std::move(index));
        } else {
          std::string name = take_name();
          result = node(Kind::kAttribute, std::move(name), std::move(result));
        }
      } else if (take("[")) {
        result = subscript(std::move(result));
      } else if (take("(")) {
        result = arguments(node(Kind::kCall, "", std::move(result)));
      } else {
        return result;
      }
    }
  }

  Expression subscript(Expression base) {
    std::vector<Expression> parts;
    parts.push_back(std::move(base));
    Expression part = literal(Value::none());
    bool is_slice = false, has_part = false;
    while (!take("]")) {
      if (take(":")) {
        is_slice = true;
        parts.push_back(std::exchange(part, literal(Value::none())));
        has_part = false;
      } else {
        if (has_part) fail("a subscript of several values is not supported");
        part = expression();
        has_part = true;
      }
    }
    if (!is_slice && !has_part) fail("a subscript is empty");
    parts.push_back(std::move(part));
    if (parts.size() > 4) fail("a slice has at most three parts");
    while (is_slice && parts.size() < 4) parts.push_back(literal(Value::none()));
    return node(is_slice ? Kind::kSlice : Kind::kSubscript, "", std::move(parts));
  }

  // Adds the arguments after a '(' to `target`.
  Expression arguments(Expression target) {
    while (!take(")")) {
      if (is_any({"*", "**"})) fail("a call with * or ** is not supported");
      if (current().kind == Token::Kind::kName && is(next(), "=")) {
        target.names.push_back(take_name());
        ++position_;
      } else if (!target.names.empty()) {
        fail("expected a named argument");
      }
      target.operands.push_back(expression());
      if (!take(",") && !is(current(), ")")) fail("expected ',' or ')'");
    }
    set_depth(target);
    return target;
  }

  Expression filters_and_tests(Expression result) {
    while (true) {
      if (take("|")) result = filter(node(Kind::kFilter, take_name(), std::move(result)));
      else if (take("is")) result = test(std::move(result));
      else if (take("(")) result = arguments(node(Kind::kCall, "", std::move(result)));
      else return result;
    }
  }
  Expression filter(Expression result) { return take("(") ? arguments(std::move(result)) : result; }
  Expression filter_chain(Expression result) {
    result = filter(std::move(result));
    while (take("|")) {
      std::string name = take_name();
      result = filter(node(Kind::kFilter, std::move(name), std::move(result)));
    }
    return result;
  }
  Expression test(Expression tested) {
    const bool negated = take("not");
    std::string name = take_name();
    Expression result = node(Kind::kTest, std::move(name), std::move(tested));
    if (take("(")) {
      result = arguments(std::move(result));
    } else if ((current().kind >= Token::Kind::kName && current().kind <= Token::Kind::kFloat &&
                !is_any({"else", "or", "and"})) ||
               is_any({"[", "{"})) {
      if (is(current(), "is")) fail("tests cannot be chained");
      result.operands.push_back(postfix(primary()));
      set_depth(result);
    }
    return negated ? node(Kind::kUnary, "not", std::move(result)) : result;
  }

  // Statements ---------------------------------------------------------------------------------------------

  // Parses up to one of the statements `ends`. The keyword of that statement is consumed and stored in
  // ending_.
  Block block(Words ends) {
    const Level level(*this);
    Block statements;
    while (current().kind != Token::Kind::kEnd) {
      const Token& token = tokens_[position_++];
      if (token.kind == Token::Kind::kText) {
        statements.push_back(make(Statement::Kind::kText, token.line));
        statements.back().text = token.text;
      } else if (token.kind == Token::Kind::kOutputBegin) {
        statements.push_back(make(Statement::Kind::kOutput, token.line));
        statements.back().expressions.push_back(tuple(true, false));
        end_tag();
      } else {
        if (is_any(ends)) {
          ending_ = take_name();
          return statements;
        }
        statements.push_back(statement());
      }
    }
    if (ends.size() > 0) fail(str("expected ", bough::quoted(*(ends.end() - 1))));
    return statements;
  }
  // Parses the body after the opening tag, up to the statement `end`.
  Block body(std::string_view end) {
    end_tag();
    Block result = block({end});
    end_tag();
    return result;
  }
  static Statement make(Statement::Kind kind, int line) { return Statement{kind, line, "", {}, {}, {}, {}}; }

  Statement statement() {
    const int line = current().line;
    const std::string keyword = take_name();
    using S = Statement::Kind;
    if (keyword == "if") return if_statement(line);
    if (keyword == "for") return for_statement(line);
    if (keyword == "set") return set_statement(line);
    if (keyword == "macro") {
      Statement result = make(S::kMacro, line);
      result.text = take_name();
      expect("(");
      return macro(std::move(result), "endmacro");
    }
    if (keyword == "call") {
      Statement result = make(S::kCall, line);
      has_parameters_ = take("(");
      return macro(std::move(result), "endcall");
    }
    if (keyword == "filter") {
      Statement result = make(S::kFilterBlock, line);
      result.expressions.push_back(filter_chain(node(Kind::kFilter, take_name(), literal(Value::none()))));
      result.bodies.push_back(body("endfilter"));
      return result;
    }
    if (keyword == "with") {
      Statement result = make(S::kWith, line);
      while (current().kind != Token::Kind::kTagEnd) {
        if (!result.expressions.empty()) expect(",");
        result.expressions.push_back(target(false));
        expect("=");
        result.expressions.push_back(expression());
      }
      result.bodies.push_back(body("endwith"));
      return result;
    }
    if (keyword == "generation") {
      Statement result = make(S::kScope, line);
      const int loops = std::exchange(num_loops_, 0);
      result.bodies.push_back(body("endgeneration"));
      num_loops_ = loops;
      return result;
    }
    if (keyword == "break" || keyword == "continue") {
      if (num_loops_ == 0) refuse(name_, line, str(keyword, " outside of a loop"));
      end_tag();
      return make(keyword == "break" ? S::kBreak : S::kContinue, line);
    }
    refuse(name_, line, str("the statement ", bough::quoted(keyword), " is not supported"));
  }

  Statement if_statement(int line) {
    Statement result = make(Statement::Kind::kIf, line);
    do {
      result.expressions.push_back(tuple(false, false));
      end_tag();
      result.bodies.push_back(block({"elif", "else", "endif"}));
    } while (ending_ == "elif");
    if (ending_ == "else") {
      end_tag();
      result.otherwise = block({"endif"});
    }
    end_tag();
    return result;
  }

  Statement for_statement(int line) {
    Statement result = make(Statement::Kind::kFor, line);
    result.expressions.push_back(target(false));
    expect("in");
    result.expressions.push_back(tuple(false, false));
    if (take("if")) result.expressions.push_back(expression());
    result.recursive = take("recursive");
    end_tag();
    ++num_loops_;
    result.bodies.push_back(block({"else", "endfor"}));
    --num_loops_;
    if (ending_ == "else") {
      end_tag();
      result.otherwise = block({"endfor"});
    }
    end_tag();
    return result;
  }

  Statement set_statement(int line) {
    Statement result = make(Statement::Kind::kSet, line);
    result.expressions.push_back(target(true));
    if (take("=")) {
      result.expressions.push_back(tuple(true, false));
      end_tag();
      return result;
    }
    result.kind = Statement::Kind::kSetBlock;
    if (take("|"))
      result.expressions.push_back(filter_chain(node(Kind::kFilter, take_name(), literal(Value::none()))));
    const int loops = std::exchange(num_loops_, 0);
    result.bodies.push_back(body("endset"));
    num_loops_ = loops;
    return result;
  }

  // Parses the target of an assignment: a name, an attribute of a namespace, or several names.
  Expression target(bool may_be_attribute) {
    std::vector<Expression> names;
    bool is_tuple = false;
    do {
      if (names.empty() ? false : current().kind != Token::Kind::kName) break;
      const bool parenthesis = take("(");
      Expression name = parenthesis ? target(false) : node(Kind::kName, take_name());
      if (parenthesis) expect(")");
      if (may_be_attribute && take(".")) {
        std::string attribute = take_name();
        name = node(Kind::kAttribute, std::move(attribute), std::move(name));
      }
      names.push_back(std::move(name));
      is_tuple |= is(current(), ",");
    } while (take(","));
    if (!is_tuple) return std::move(names[0]);
    return node(Kind::kTuple, "", std::move(names));
  }

  // Parses the parameters and body of a macro, or of the caller that a call block passes to a macro.
  Statement macro(Statement result, std::string_view end) {
    if (std::exchange(has_parameters_, true)) {
      while (!take(")")) {
        result.names.push_back(take_name());
        if (take("=")) result.expressions.push_back(expression());
        else if (!result.expressions.empty()) fail("expected a default");
        if (!take(",") && !is(current(), ")")) fail("expected ',' or ')'");
      }
    }
    if (result.kind == Statement::Kind::kCall) {
      result.expressions.push_back(filtered_unary());
      if (result.expressions.back().kind != Kind::kCall) fail("expected a call");
    }
    const bool outer[] = {uses_caller_, uses_varargs_, uses_kwargs_};
    uses_caller_ = uses_varargs_ = uses_kwargs_ = false;
    const int loops = std::exchange(num_loops_, 0);
    result.bodies.push_back(body(end));
    num_loops_ = loops;
    result.uses_caller = std::exchange(uses_caller_, outer[0]);
    result.uses_varargs = std::exchange(uses_varargs_, outer[1]);
    result.uses_kwargs = std::exchange(uses_kwargs_, outer[2]);
    return result;
  }

  std::vector<Token> tokens_;
  const std::string& name_;
  size_t position_ = 0;
  int depth_ = 0;
  int num_loops_ = 0;
  bool has_parameters_ = true;
  bool uses_caller_ = false, uses_varargs_ = false, uses_kwargs_ = false;
  std::string ending_;
};

}  // namespace

Block parse(std::string_view source, const std::string& name) {
  if (source.size() > kLongestTemplate)
    throw UserError(
        str(name, ": chat template: got ", source.size(), " bytes, expected at most ", kLongestTemplate));
  return Parser(tokens_of(source, name), name).run();
}

}  // namespace bough::jinja

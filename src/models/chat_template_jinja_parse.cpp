// The parser from source to statements: first the pieces between tags, then a recursive descent over each
// tag's words.
#include <algorithm>
#include <cctype>
#include <set>

#include "base/error.h"
#include "models/chat_template_jinja.h"

namespace bough::jinja {
namespace {

// Templates of unknown origin must not exhaust the stack.
constexpr int kDeepest = 100;                 // nesting of expressions and blocks
constexpr size_t kMostWords = 1000;           // in one tag
constexpr size_t kLongestTemplate = 1 << 18;  // bytes; those of today's models have 3-10 kB

struct Word {
  enum class Kind { kName, kString, kInteger, kOperator, kEnd };
  Kind kind;
  std::string text;
};

struct Piece {
  enum class Kind { kText, kOutput, kStatement };
  Kind kind;
  std::string text;
};

bool is_space(char c) {
  return std::isspace(static_cast<unsigned char>(c));
}
bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
}

[[noreturn]] void refuse(const std::string& name, const std::string& what) {
  throw UserError(str(name, ": chat template: ", what,
                      ". Only ChatML templates are supported; without one, use "
                      "plain prompts (`prompt` instead of `messages`)"));
}

// Position behind the tag that begins at `begin` and closes with `close`; a `close` inside strings does not
// count.
size_t end_of_tag(std::string_view source, size_t begin, std::string_view close, const std::string& name) {
  char quote = 0;
  for (size_t i = begin + 2; i < source.size(); ++i) {
    const char c = source[i];
    if (quote != 0) {
      if (c == '\\') ++i;
      else if (c == quote) quote = 0;
    } else if (close != "#}" && (c == '\'' || c == '"')) {
      quote = c;
    } else if (source.substr(i).starts_with(close)) {
      return i + 2;
    }
  }
  refuse(name, str("a tag is not closed: ", bough::quoted(source.substr(begin, 40))));
}

// Removes what the tag that follows `text` takes from its end: all white space for '-', blanks on the tag's
// line for blocks and comments (lstrip_blocks).
void trim_before_tag(std::string& text, bool at_line_start, char mark, bool is_output) {
  if (mark == '-') {
    while (!text.empty() && is_space(text.back())) text.pop_back();
  } else if (!is_output && mark != '+') {
    size_t end = text.size();
    while (end > 0 && (text[end - 1] == ' ' || text[end - 1] == '\t')) --end;
    if (end > 0 ? text[end - 1] == '\n' : at_line_start) text.resize(end);
  }
}

// Finds where the next tag begins, or the end.
size_t find_tag(std::string_view source, size_t from) {
  for (size_t i = from; i + 1 < source.size(); ++i)
    if (source[i] == '{' && (source[i + 1] == '{' || source[i + 1] == '%' || source[i + 1] == '#')) return i;
  return source.size();
}

std::string with_unix_lines(std::string_view source) {
  std::string out;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r' && i + 1 < source.size() && source[i + 1] == '\n') continue;
    out += source[i] == '\r' ? '\n' : source[i];
  }
  if (out.ends_with('\n')) out.pop_back();  // Jinja drops the last line's end
  return out;
}

std::vector<Piece> cut(std::string_view given, const std::string& name) {
  const std::string source = with_unix_lines(given);
  std::vector<Piece> pieces;
  size_t position = 0;
  bool strip_text = false;  // the tag before ended in '-'
  while (position < source.size()) {
    const size_t tag = find_tag(source, position);
    std::string text = source.substr(position, tag - position);
    const bool at_line_start = position == 0 || source[position - 1] == '\n';
    if (strip_text)
      text.erase(0, static_cast<size_t>(std::find_if_not(text.begin(), text.end(), is_space) - text.begin()));
    const bool all_stripped = strip_text && text.empty();
    strip_text = false;
    position = tag;
    if (tag < source.size()) {
      const char kind = source[tag + 1];
      const std::string close = kind == '{' ? "}}" : kind == '%' ? "%}" : "#}";
      position = end_of_tag(source, tag, close, name);
      std::string_view inside = std::string_view(source).substr(tag + 2, position - tag - 4);
      const char first = inside.empty() ? ' ' : inside.front();
      if (!all_stripped) trim_before_tag(text, at_line_start, first, kind == '{');
      if (first == '-' || (first == '+' && kind != '{')) inside.remove_prefix(1);
      const char last = inside.empty() ? ' ' : inside.back();
      strip_text = last == '-';
      if (last == '-' || (last == '+' && kind != '{')) inside.remove_suffix(1);
      if (!text.empty()) pieces.push_back({Piece::Kind::kText, text});
      if (kind != '#')
        pieces.push_back({kind == '{' ? Piece::Kind::kOutput : Piece::Kind::kStatement, std::string(inside)});
      // trim_blocks removes the line break after a block or comment.
      if (kind != '{' && last != '-' && last != '+' && position < source.size() && source[position] == '\n')
        ++position;
    } else if (!text.empty()) {
      pieces.push_back({Piece::Kind::kText, text});
    }
  }
  return pieces;
}

std::string unescape(std::string_view quoted_text, const std::string& name) {
  std::string out;
  for (size_t i = 0; i < quoted_text.size(); ++i) {
    if (quoted_text[i] != '\\') {
      out += quoted_text[i];
      continue;
    }
    const char escaped = ++i < quoted_text.size() ? quoted_text[i] : 0;
    constexpr std::string_view kEscapes = "ntr\\'\"";
    const size_t index = kEscapes.find(escaped);
    if (escaped == 0 || index == std::string_view::npos) refuse(name, "an unknown escape in a string");
    out += "\n\t\r\\'\""[index];
  }
  return out;
}

std::vector<Word> words_of(std::string_view text, const std::string& name) {
  std::vector<Word> words;
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    size_t end = i + 1;
    if (is_space(c)) {
      i = end;
    } else if (c == '\'' || c == '"') {
      while (end < text.size() && text[end] != c) end += text[end] == '\\' ? 2 : 1;
      if (end >= text.size()) refuse(name, "a string is not closed");
      words.push_back({Word::Kind::kString, unescape(text.substr(i + 1, end - i - 1), name)});
      i = end + 1;
    } else if (is_name(c)) {
      while (end < text.size() && is_name(text[end])) ++end;
      const bool number = std::isdigit(static_cast<unsigned char>(c));
      words.push_back(
          {number ? Word::Kind::kInteger : Word::Kind::kName, std::string(text.substr(i, end - i))});
      i = end;
    } else {
      for (const std::string_view two : {"==", "!=", "<=", ">=", "//", "**"})
        if (text.substr(i).starts_with(two)) end = i + 2;
      words.push_back({Word::Kind::kOperator, std::string(text.substr(i, end - i))});
      i = end;
    }
  }
  if (words.size() > kMostWords) refuse(name, "a tag is too long");
  words.push_back({Word::Kind::kEnd, ""});
  return words;
}

// Parses one tag's words to an expression; the methods follow Jinja's order of precedence, loosest first.
class ExpressionParser {
 public:
  ExpressionParser(std::string_view text, const std::string& name)
      : words_(words_of(text, name)), name_(name), text_(text) {}

  bool take(std::string_view text) {
    const Word& word = words_[position_];
    const bool is =
        (word.kind == Word::Kind::kName || word.kind == Word::Kind::kOperator) && word.text == text;
    position_ += is;
    return is;
  }
  void expect(std::string_view text) {
    if (!take(text)) fail();
  }
  std::string take_name() {
    if (words_[position_].kind != Word::Kind::kName) fail();
    return words_[position_++].text;
  }
  void expect_end() {
    if (words_[position_].kind != Word::Kind::kEnd) fail();
  }

  Expression expression() {
    if (++depth_ > kDeepest) refuse(name_, "expressions are nested too deeply");
    Expression result = disjunction();
    if (take("if")) {
      Expression condition = disjunction();
      Expression otherwise = literal(Json(Json::value_t::discarded));
      if (take("else")) otherwise = expression();
      result = node(Expression::Kind::kInlineIf, "", {condition, result, otherwise});
    }
    --depth_;
    return result;
  }

  Expression postfix() {
    Expression result = primary();
    while (true) {
      if (take(".")) result = node(Expression::Kind::kAttribute, take_name(), {result});
      else if (take("[")) result = subscript(std::move(result));
      else if (take("(")) result = call(std::move(result));
      else return result;
    }
  }

 private:
  using Kind = Expression::Kind;

  [[noreturn]] void fail() const {
    refuse(name_, str("unsupported or wrong syntax near ", bough::quoted(words_[position_].text), " in ",
                      bough::quoted(text_)));
  }
  static Expression node(Kind kind, std::string name, std::vector<Expression> operands) {
    return {kind, std::move(name), Json(), std::move(operands), {}};
  }
  static Expression literal(Json value) { return {Kind::kLiteral, "", std::move(value), {}, {}}; }

  Expression disjunction() {
    Expression left = conjunction();
    while (take("or")) left = node(Kind::kBinary, "or", {left, conjunction()});
    return left;
  }
  Expression conjunction() {
    Expression left = negation();
    while (take("and")) left = node(Kind::kBinary, "and", {left, negation()});
    return left;
  }
  Expression negation() {
    if (++depth_ > kDeepest) refuse(name_, "expressions are nested too deeply");
    Expression result = take("not") ? node(Kind::kUnary, "not", {negation()}) : comparison();
    --depth_;
    return result;
  }
  Expression comparison() {
    Expression left = sum();
    for (const char* operation : {"==", "!=", "<=", ">=", "<", ">", "in"})
      if (take(operation)) return no_chain(node(Kind::kBinary, operation, {left, sum()}));
    if (words_[position_].text == "not" && words_[position_ + 1].text == "in") {
      position_ += 2;
      return no_chain(node(Kind::kUnary, "not", {node(Kind::kBinary, "in", {left, sum()})}));
    }
    return left;
  }
  Expression no_chain(Expression comparison) {  // a < b < c
    for (const char* operation : {"==", "!=", "<=", ">=", "<", ">", "in"})
      if (words_[position_].kind != Word::Kind::kString && words_[position_].text == operation) fail();
    return comparison;
  }
  Expression sum() { return binary({"+", "-"}, &ExpressionParser::concatenation); }
  Expression concatenation() { return binary({"~"}, &ExpressionParser::product); }
  Expression product() { return binary({"*", "//", "%"}, &ExpressionParser::signed_value); }
  Expression binary(std::vector<const char*> operations, Expression (ExpressionParser::*operand)()) {
    Expression left = (this->*operand)();
    for (size_t i = 0; i < operations.size();) {
      if (take(operations[i])) {
        left = node(Kind::kBinary, operations[i], {left, (this->*operand)()});
        i = 0;
      } else {
        ++i;
      }
    }
    return left;
  }
  Expression signed_value() {
    Expression result = take("-") ? node(Kind::kUnary, "-", {postfix()}) : postfix();
    while (true) {
      if (take("|")) {
        result = node(Kind::kFilter, take_name(), {result});
        if (take("(")) result = arguments(std::move(result));
      } else if (take("is")) {
        const bool negated = take("not");
        result = node(Kind::kTest, take_name(), {result});
        if (negated) result = node(Kind::kUnary, "not", {result});
      } else {
        return result;
      }
    }
  }

  Expression primary() {
    const Word word = words_[position_];
    if (take("(")) {
      Expression inside = expression();
      expect(")");
      return inside;
    }
    if (take("[")) {
      Expression list = node(Kind::kList, "", {});
      while (!take("]")) {
        list.operands.push_back(expression());
        if (!take(",")) {
          expect("]");
          break;
        }
      }
      return list;
    }
    if (word.kind == Word::Kind::kOperator || word.kind == Word::Kind::kEnd) fail();
    ++position_;
    if (word.kind == Word::Kind::kString) return literal(Json(word.text));
    if (word.kind == Word::Kind::kInteger) {
      if (word.text.size() > 9 || word.text.find_first_not_of("0123456789") != std::string::npos) fail();
      return literal(Json(std::stoi(word.text)));
    }
    if (word.text == "true" || word.text == "True") return literal(Json(true));
    if (word.text == "false" || word.text == "False") return literal(Json(false));
    if (word.text == "none" || word.text == "None") return literal(Json(nullptr));
    return node(Kind::kName, word.text, {});
  }

  Expression subscript(Expression base) {
    std::vector<Expression> parts{std::move(base)};
    bool slice = false;
    Expression part = literal(Json(Json::value_t::discarded));
    while (!take("]")) {
      if (take(":")) {
        slice = true;
        parts.push_back(std::exchange(part, literal(Json(Json::value_t::discarded))));
      } else {
        part = expression();
        if (words_[position_].text != ":" && words_[position_].text != "]") fail();
      }
    }
    parts.push_back(part);
    if (parts.size() > 4) fail();
    if (!slice) return node(Kind::kSubscript, "", std::move(parts));
    while (parts.size() < 4) parts.push_back(literal(Json(Json::value_t::discarded)));
    return node(Kind::kSlice, "", std::move(parts));
  }

  Expression call(Expression callee) { return arguments(node(Kind::kCall, "", {std::move(callee)})); }

  // Adds the arguments behind a '(' to `target`.
  Expression arguments(Expression target) {
    while (!take(")")) {
      if (words_[position_].kind == Word::Kind::kName && words_[position_ + 1].text == "=") {
        target.keywords.push_back(take_name());
        ++position_;
      } else if (!target.keywords.empty()) {
        fail();
      }
      target.operands.push_back(expression());
      if (!take(",")) {
        expect(")");
        break;
      }
    }
    return target;
  }

  std::vector<Word> words_;
  const std::string& name_;
  std::string text_;
  size_t position_ = 0;
  int depth_ = 0;
};

class StatementParser {
 public:
  StatementParser(std::vector<Piece> pieces, const std::string& name)
      : pieces_(std::move(pieces)), name_(name) {}

  std::vector<Statement> run() {
    std::vector<Statement> program = block({});
    return program;
  }

 private:
  // Reads up to one of the statements `ends`, whose keyword is left in ending_ and whose expression in
  // condition_.
  std::vector<Statement> block(const std::set<std::string>& ends) {
    if (++depth_ > kDeepest) refuse(name_, "blocks are nested too deeply");
    std::vector<Statement> statements;
    while (position_ < pieces_.size()) {
      const Piece& piece = pieces_[position_++];
      if (piece.kind == Piece::Kind::kText) {
        statements.push_back({Statement::Kind::kText, piece.text, {}, {}, {}});
        continue;
      }
      ExpressionParser words(piece.text, name_);
      if (piece.kind == Piece::Kind::kOutput) {
        statements.push_back({Statement::Kind::kOutput, "", {words.expression()}, {}, {}});
        words.expect_end();
        continue;
      }
      const std::string keyword = words.take_name();
      if (ends.contains(keyword)) {
        if (keyword == "elif") condition_ = {words.expression()};
        words.expect_end();
        ending_ = keyword;
        --depth_;
        return statements;
      }
      statements.push_back(statement(keyword, words));
    }
    if (!ends.empty()) refuse(name_, "a block is not closed");
    --depth_;
    return statements;
  }

  Statement statement(const std::string& keyword, ExpressionParser& words) {
    Statement result{};
    if (keyword == "if") {
      result.kind = Statement::Kind::kIf;
      result.expressions.push_back(words.expression());
      words.expect_end();
      finish_if(result);
    } else if (keyword == "for") {
      result.kind = Statement::Kind::kFor;
      result.text = words.take_name();
      words.expect("in");
      result.expressions.push_back(words.expression());
      words.expect_end();
      result.body = block({"endfor"});
    } else if (keyword == "set") {
      result.kind = Statement::Kind::kSet;
      result.expressions.push_back(words.postfix());
      const Expression& target = result.expressions[0];
      const bool name = target.kind == Expression::Kind::kName;
      const bool attribute =
          target.kind == Expression::Kind::kAttribute && target.operands[0].kind == Expression::Kind::kName;
      if (!name && !attribute) refuse(name_, "an unsupported target of `set`");
      words.expect("=");
      result.expressions.push_back(words.expression());
      words.expect_end();
    } else if (keyword == "generation") {
      result.kind = Statement::Kind::kBlock;
      words.expect_end();
      result.body = block({"endgeneration"});
    } else {
      refuse(name_, str("the statement ", bough::quoted(keyword), " is not supported"));
    }
    return result;
  }

  // Reads what follows the condition of an if or elif.
  void finish_if(Statement& result) {
    if (++depth_ > kDeepest) refuse(name_, "blocks are nested too deeply");
    result.body = block({"elif", "else", "endif"});
    if (ending_ == "elif") {
      Statement rest{};
      rest.kind = Statement::Kind::kIf;
      rest.expressions = std::move(condition_);
      finish_if(rest);
      result.otherwise.push_back(std::move(rest));
    } else if (ending_ == "else") {
      result.otherwise = block({"endif"});
    }
    --depth_;
  }

  std::vector<Piece> pieces_;
  const std::string& name_;
  size_t position_ = 0;
  int depth_ = 0;
  std::string ending_;
  std::vector<Expression> condition_;
};

}  // namespace

std::vector<Statement> parse(std::string_view source, const std::string& name) {
  if (source.size() > kLongestTemplate) refuse(name, str("it has ", source.size(), " bytes"));
  return StatementParser(cut(source, name), name).run();
}

}  // namespace bough::jinja

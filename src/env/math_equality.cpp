#include "env/math_equality.h"

#include <algorithm>
#include <array>
#include <optional>

#include "base/ascii.h"
#include "base/error.h"
#include "base/random.h"
#include "env/exact_number.h"
#include "env/math_expression.h"
#include "env/math_value.h"
#include "env/reward.h"

namespace bough {

namespace {

using Kind = Expression::Kind;

constexpr int64_t kMostWork = 100'000;  // nodes evaluated per comparison; a real-valued node counts as twenty

// ---- Comparison.

bool is_value(const Expression& e) {
  switch (e.kind) {
    case Kind::kNumber:
    case Kind::kSymbol: return true;
    case Kind::kSum:
    case Kind::kProduct:
    case Kind::kQuotient:
    case Kind::kNegate:
    case Kind::kPower:
    case Kind::kFunction: return std::all_of(e.children.begin(), e.children.end(), is_value);
    default: return false;
  }
}

bool has_plus_minus(const Expression& e) {
  return e.kind == Kind::kPlusMinus || std::any_of(e.children.begin(), e.children.end(), has_plus_minus);
}

// Replaces every plus-minus by the sign.
Expression with_sign(const Expression& e, int sign) {
  Expression out = e;
  for (Expression& child : out.children) child = with_sign(child, sign);
  if (out.kind == Kind::kPlusMinus) {
    Expression inside = std::move(out.children[0]);
    if (sign * out.sign > 0) return inside;
    out.kind = Kind::kNegate;
    out.children[0] = std::move(inside);
  }
  return out;
}

Expression node(Kind kind, std::vector<Expression> children) {
  Expression e;
  e.kind = kind;
  e.children = std::move(children);
  return e;
}

class Comparer {
 public:
  explicit Comparer(const std::string& seed)
      : fields_{PrimeField(stable_hash(seed.data(), seed.size())),
                PrimeField(stable_hash(seed.data(), seed.size()) * 0x9E3779B97F4A7C15u + 1)} {}

  bool equal(const Expression& a, const Expression& b) {
    work_ += static_cast<int64_t>(count_nodes(a) + count_nodes(b));
    if (work_ > kMostWork) return false;
    for (const auto& [x, y] : {std::pair(&a, &b), std::pair(&b, &a)}) {
      if (x->kind == Kind::kSet || !has_plus_minus(*x)) continue;
      if (x->kind == Kind::kRelation && y->kind == Kind::kRelation) continue;
      const Expression both = node(Kind::kSet, {with_sign(*x, 1), with_sign(*x, -1)});
      return equal(both, *y);
    }
    if (a.kind == Kind::kRelation || b.kind == Kind::kRelation) return equal_relations(a, b);
    if (is_value(a) && is_value(b)) return equal_values(a, b);
    if (a.kind != b.kind) return false;
    switch (a.kind) {
      case Kind::kInfinity: return true;
      case Kind::kNegate: return equal(a.children[0], b.children[0]);
      case Kind::kText: return a.text == b.text;
      case Kind::kSet:
      case Kind::kUnion: return equal_sets(a.children, b.children);
      case Kind::kGroup: {
        const bool interval = a.children.size() == 2;  // otherwise (1, 2, 3) and [1, 2, 3] are equal
        return (!interval || a.text == b.text) && equal_items(a.children, b.children);
      }
      case Kind::kMatrix: return a.columns == b.columns && equal_items(a.children, b.children);
      default: return false;
    }
  }

 private:
  bool equal_items(const std::vector<Expression>& a, const std::vector<Expression>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [&](const Expression& x, const Expression& y) { return equal(x, y); });
  }

  // Every element of each side has an equal element on the other side: {1, 1, 2} equals {2, 1}. An element
  // with plus-minus stands for two elements.
  bool equal_sets(const std::vector<Expression>& a, const std::vector<Expression>& b) {
    const auto spread = [](const std::vector<Expression>& items) {
      std::vector<Expression> out;
      for (const Expression& item : items) {
        if (has_plus_minus(item)) {
          out.push_back(with_sign(item, 1));
          out.push_back(with_sign(item, -1));
        } else {
          out.push_back(item);
        }
      }
      return out;
    };
    const std::vector<Expression> left = spread(a), right = spread(b);
    const auto covered = [&](const std::vector<Expression>& from, const std::vector<Expression>& in) {
      return std::all_of(from.begin(), from.end(), [&](const Expression& x) {
        return std::any_of(in.begin(), in.end(), [&](const Expression& y) { return equal(x, y); });
      });
    };
    return covered(left, right) && covered(right, left);
  }

  // A name for a value: x, f(x), "area".
  static bool is_name(const Expression& e) {
    if (e.kind == Kind::kText) return true;
    if (e.kind == Kind::kSymbol) return e.text != "pi" && e.text != "e" && e.text != "i";
    return e.kind == Kind::kProduct && e.children[0].kind == Kind::kSymbol &&
           (e.children[1].kind == Kind::kSymbol || e.children[1].kind == Kind::kNumber) &&
           is_name(e.children[0]);
  }

  static bool is_equation(const Expression& e) {
    return e.kind == Kind::kRelation && e.text.find_first_not_of('=') == std::string::npos;
  }

  // Converts bounds of one variable, such as 1 < x <= 2, to an interval. Sets `name` to the variable. nullopt
  // if `e` is not of this form.
  static std::optional<Expression> as_interval(const Expression& e, std::string& name) {
    if (e.kind != Kind::kRelation) return std::nullopt;
    const auto variable = [&](const Expression& side) {
      if (side.kind != Kind::kSymbol || !has_variables(side)) return false;
      name = side.text;
      return true;
    };
    const auto up = [](char c) { return c == '<' || c == 'l'; };
    const auto down = [](char c) { return c == '>' || c == 'g'; };
    const auto closed = [](char c) { return c == 'l' || c == 'g'; };
    Expression low = node(Kind::kNegate, {node(Kind::kInfinity, {})}), high = node(Kind::kInfinity, {});
    char low_bracket = '(', high_bracket = ')';
    if (e.text.size() == 1 && (up(e.text[0]) || down(e.text[0]))) {
      const bool left = variable(e.children[0]);
      if (!left && !variable(e.children[1])) return std::nullopt;
      const Expression& bound = e.children[left ? 1 : 0];
      if (left == up(e.text[0])) {
        high = bound;
        if (closed(e.text[0])) high_bracket = ']';
      } else {
        low = bound;
        if (closed(e.text[0])) low_bracket = '[';
      }
    } else if (e.text.size() == 2 && variable(e.children[1]) &&
               ((up(e.text[0]) && up(e.text[1])) || (down(e.text[0]) && down(e.text[1])))) {
      const bool rising = up(e.text[0]);
      low = e.children[rising ? 0 : 2];
      high = e.children[rising ? 2 : 0];
      if (closed(e.text[rising ? 0 : 1])) low_bracket = '[';
      if (closed(e.text[rising ? 1 : 0])) high_bracket = ']';
    } else {
      return std::nullopt;
    }
    Expression interval = node(Kind::kGroup, {std::move(low), std::move(high)});
    interval.text = {low_bracket, high_bracket};
    return interval;
  }

  bool equal_relations(const Expression& a, const Expression& b) {
    std::string left_name, right_name;
    const auto left = as_interval(a, left_name), right = as_interval(b, right_name);
    if (left && right) return left_name == right_name && equal(*left, *right);
    if (left) return equal(*left, b);
    if (right) return equal(a, *right);
    if (is_equation(a) && is_equation(b)) return equal_equations(a, b);
    if (a.kind == b.kind) return a.text == b.text && equal_items(a.children, b.children);
    // An equation is compared by its right side: "x = 3" equals "3", and "7 + 5 = 12" equals "12".
    const Expression& equation = a.kind == Kind::kRelation ? a : b;
    const Expression& other = a.kind == Kind::kRelation ? b : a;
    if (!is_equation(equation)) return false;
    if (!is_name(equation.children[0]) && !equal(equation.children[0], equation.children.back()))
      return false;
    return equal(equation.children.back(), other);
  }

  // Equations are equal if left - right of one is left - right of the other, times a constant other than 0.
  bool equal_equations(const Expression& a, const Expression& b) {
    if (is_name(a.children[0]) && is_name(b.children[0])) {
      const bool same_name = a.children[0].kind == Kind::kText ? a.children[0].text == b.children[0].text
                                                               : equal(a.children[0], b.children[0]);
      if (same_name && equal(a.children.back(), b.children.back())) return true;
    }
    const auto difference = [](const Expression& e) {
      return node(Kind::kSum, {e.children.front(), node(Kind::kNegate, {e.children.back()})});
    };
    const Expression left = difference(a), right = difference(b);
    if (!is_value(left) || !is_value(right)) return false;
    for (const PrimeField& field : fields_) {
      bool unknowns = false;
      const auto a1 = field.value(left, unknowns, 1), a2 = field.value(left, unknowns, 2);
      const auto b1 = field.value(right, unknowns, 1), b2 = field.value(right, unknowns, 2);
      if (!a1 || !a2 || !b1 || !b2 || *a1 == 0 || *b1 == 0 || *a1 == *a2) return false;
      if (field.times(*a1, *b2) != field.times(*a2, *b1)) return false;
    }
    return true;
  }

  bool equal_values(const Expression& a, const Expression& b) {
    bool unknowns = false, same = true;
    for (const PrimeField& field : fields_) {
      const auto left = field.value(a, unknowns), right = field.value(b, unknowns);
      if (!left || !right) return false;
      same = same && *left == *right;
    }
    if (same) return true;
    if (!unknowns) return false;
    work_ += 20 * static_cast<int64_t>(count_nodes(a) + count_nodes(b));
    if (work_ > kMostWork) return false;
    return agree_in_reals(a, b);
  }

  std::array<PrimeField, 2> fields_;
  int64_t work_ = 0;
};

// ---- Texts.

// Removes spaces (except between digits), dollars, braces, and LaTeX commands for sizes and fonts, and
// converts to lower case.
std::string undressed(std::string_view text) {
  constexpr std::string_view kDress[] = {
      "\\left",         "\\right", "\\text", "\\mathrm", "\\mathbf", "\\textbf", "\\mbox",
      "\\displaystyle", "\\,",     "\\!",    "\\;",      "\\:",      "\\ ",      "\\$"};
  std::string out;
  for (size_t i = 0; i < text.size();) {
    size_t skip = 0;
    if (text[i] == '\\') {
      for (const std::string_view dress : kDress)
        if (text.substr(i, dress.size()) == dress) skip = std::max(skip, dress.size());
      if (text.substr(i, 6) == "\\dfrac" || text.substr(i, 6) == "\\tfrac") {
        out += "\\frac";
        skip = 6;
      }
    }
    const char c = text[i];
    if (skip == 0 && (c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '$' || c == '{' || c == '}'))
      skip = 1;
    const bool digit = c >= '0' && c <= '9';
    const bool apart =
        digit && i > 0 && text[i - 1] == ' ' && !out.empty() && out.back() >= '0' && out.back() <= '9';
    if (skip == 0) {
      if (apart) out += ' ';
      out += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
      skip = 1;
    }
    i += skip;
  }
  while (!out.empty() && out.back() == '.') out.pop_back();
  return out;
}

// The text as one literal number of any length.
std::optional<ExactNumber> literal(std::string_view text) {
  text = trimmed(text);
  if (!text.empty() && text.back() == '.') text.remove_suffix(1);
  const NumberSpan span = find_number(text, 0, true);
  if (span.length == 0 || span.begin != 0 || span.length != text.size()) return std::nullopt;
  return parse_number(text);
}

// Position of the last occurrence of the word, ignoring case. npos if there is none.
size_t rfind_word(std::string_view text, std::string_view word) {
  for (size_t i = text.size() >= word.size() ? text.size() - word.size() + 1 : 0; i-- > 0;) {
    const bool here = std::equal(word.begin(), word.end(), text.begin() + i, [](char a, char b) {
      return a == (b >= 'A' && b <= 'Z' ? static_cast<char>(b - 'A' + 'a') : b);
    });
    if (here) return i;
  }
  return std::string_view::npos;
}

std::optional<std::string_view> last_boxed(std::string_view text) {
  const size_t at = text.rfind("\\boxed");
  if (at == std::string_view::npos) return std::nullopt;
  std::string_view rest = text.substr(at + 6);
  while (!rest.empty() && rest[0] == ' ') rest.remove_prefix(1);
  if (rest.empty()) return rest;
  if (rest[0] != '{') return rest.substr(0, rest.find_first_of(" $\n"));
  size_t depth = 0;
  for (size_t i = 0; i < rest.size(); ++i) {
    if (rest[i] == '\\') {  // \{ is not a brace
      ++i;
    } else if (rest[i] == '{') {
      ++depth;
    } else if (rest[i] == '}' && --depth == 0) {
      return trimmed(rest.substr(1, i - 1));
    }
  }
  return std::string_view();  // never closed: truncated, or not an answer
}

// The text up to a line break, or up to a period at the end or before a space.
std::string_view sentence(std::string_view text) {
  size_t i = std::min(text.find_first_not_of(" \t\r\n*:"), text.size());
  text.remove_prefix(i);
  for (i = 0; i < text.size(); ++i) {
    if (text[i] == '\n') break;
    if (text[i] == '.' && (i + 1 == text.size() || text[i + 1] == ' ' || text[i + 1] == '\n')) break;
  }
  text = trimmed(text.substr(0, i));
  while (!text.empty() && text.back() == '*') text.remove_suffix(1);
  return text;
}

std::optional<std::string_view> last_formula(std::string_view text) {
  const auto between = [&](std::string_view open, std::string_view close) -> std::optional<std::string_view> {
    const size_t end = text.rfind(close);
    if (end == std::string_view::npos || end == 0) return std::nullopt;
    const size_t begin = text.rfind(open, end - 1);
    if (begin == std::string_view::npos || begin + open.size() > end) return std::nullopt;
    const std::string_view inside = text.substr(begin + open.size(), end - begin - open.size());
    // In "$5 and $6", the text between the dollar signs is no formula. It ends with a space.
    if (open == "$" && !inside.empty() && inside.back() == ' ') return std::nullopt;
    return trimmed(inside);
  };
  const auto dollars = between("$", "$"), parentheses = between("\\(", "\\)");
  if (!dollars || !parentheses) return dollars ? dollars : parentheses;
  return dollars->data() > parentheses->data() ? dollars : parentheses;
}

class MathReward : public RewardFunction {
 public:
  explicit MathReward(const MathVerifierOptions& options) : options_(options) {}

  std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) override {
    std::vector<RewardResult> results;
    for (const RewardRequest& request : requests) {
      BOUGH_CHECK(request.problem != nullptr, "request ", results.size(), " has no problem");
      const std::string_view answer = find_math_answer(request.completion, options_.require_marker);
      if (answer.empty()) {
        results.push_back({0, false, "no answer"});
        continue;
      }
      const MathComparison comparison = compare_math(answer, math_reference(request.problem->answer));
      std::string message = comparison.equal ? "correct" : str(quoted(answer), " is not the answer");
      if (comparison.by_text) message += " (the reference could not be read as a formula: compared as text)";
      results.push_back({comparison.equal ? 1.0 : 0.0, false, std::move(message)});
    }
    return results;
  }

  void check(const Dataset& dataset) const override {
    for (const Problem& problem : dataset.problems()) {
      if (math_reference(problem.answer).empty())
        throw UserError(str(dataset.source(), ": problem ", quoted(problem.id),
                            ": it has no answer, and reward: math needs one"));
    }
  }

 private:
  MathVerifierOptions options_;
};

}  // namespace

MathComparison compare_math(std::string_view answer, std::string_view reference) {
  answer = trimmed(answer);
  reference = trimmed(reference);
  if (answer.empty() || reference.empty()) return {};
  const auto a = literal(answer), b = literal(reference);
  if (a && b) return {*a == *b, false};
  const auto right = parse_expression(reference);
  if (!right) return {undressed(answer) == undressed(reference), !b};
  const auto left = parse_expression(answer);
  if (!left) return {};
  Comparer comparer(str(answer, "\n", reference));
  if (comparer.equal(*left, *right)) return {true, false};
  if (left->percent != right->percent) {
    Expression hundred;
    hundred.text = "100";
    const Expression &with = left->percent ? *left : *right, &without = left->percent ? *right : *left;
    if (comparer.equal(node(Kind::kQuotient, {with, hundred}), without)) return {true, false};
  }
  return {};
}

std::string_view find_math_answer(std::string_view text, bool require_marker) {
  constexpr std::string_view kThought = "</think>";
  if (const size_t at = text.rfind(kThought); at != std::string_view::npos) {
    const std::string_view after = text.substr(at + kThought.size());
    if (!trimmed(after).empty()) text = after;
  }
  if (const auto boxed = last_boxed(text)) return *boxed;
  if (const size_t at = text.rfind("<answer>"); at != std::string_view::npos) {
    const std::string_view rest = text.substr(at + 8);
    return trimmed(rest.substr(0, rest.find("</answer>")));
  }
  if (const size_t at = text.rfind("####"); at != std::string_view::npos) {
    const std::string_view rest = text.substr(at + 4);
    return trimmed(rest.substr(0, rest.find('\n')));
  }
  size_t after = std::string_view::npos;
  for (const std::string_view marker : {"answer is", "answer:", "answer**:"}) {
    const size_t at = rfind_word(text, marker);
    if (at != std::string_view::npos && (after == std::string_view::npos || at + marker.size() > after))
      after = at + marker.size();
  }
  if (after != std::string_view::npos) {
    const std::string_view said = sentence(text.substr(after));
    const auto formula = last_formula(said);  // "the answer is the number $5$"
    return formula && !formula->empty() ? *formula : said;
  }
  if (require_marker) return {};
  if (const auto formula = last_formula(text)) return *formula;
  NumberSpan span;
  for (NumberSpan next = find_number(text, 0, true); next.length != 0;
       next = find_number(text, next.begin + next.length, true))
    span = next;
  if (span.length != 0 && trimmed(text).size() > 40) return text.substr(span.begin, span.length);
  return trimmed(text).size() <= 40 ? trimmed(text) : std::string_view();
}

std::string_view math_reference(std::string_view answer) {
  if (const size_t at = answer.rfind("####"); at != std::string_view::npos)
    return trimmed(answer.substr(at + 4));
  if (const auto boxed = last_boxed(answer)) return *boxed;
  return trimmed(answer);
}

std::unique_ptr<RewardFunction> make_math_reward(const MathVerifierOptions& options) {
  return std::make_unique<MathReward>(options);
}

}  // namespace bough

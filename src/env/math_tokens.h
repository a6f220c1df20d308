// Splits a formula, LaTeX or plain, into tokens. Formatting (\left, spacing, dollars, degrees) is dropped.
// Internal to math_expression.cpp.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace bough {

struct UnreadableFormula {};  // thrown inside the parser only

enum class TokenKind { kNumber, kSymbol, kFunction, kWord, kText, kMark, kEnd };

// Marks are single characters: + - * / ^ _ ! % | ( ) [ ] { } , & = < > and
//   P plus-minus   M minus-plus   U union   I infinity   l at most   g at least   E element of
//   S set opens    s set closes   F \frac   Q \sqrt   B \binom   N new matrix row   0 empty set   R all reals
//   b begin of a matrix   e end of it
struct Token {
  TokenKind kind = TokenKind::kEnd;
  std::string text;
  bool space_before = false;
};

// The last token is kEnd. Throws UnreadableFormula if the text is no formula.
std::vector<Token> formula_tokens(std::string_view text);

// Returns the words of a text in lower case, with one space between them and without a period at the end.
std::string lower_words(std::string_view text);

}  // namespace bough

#include "env/verifier.h"

#include <algorithm>

#include "base/error.h"

namespace bough {

namespace {

constexpr std::string_view kHashes = "####";
constexpr std::string_view kBoxed = "\\boxed{";
constexpr size_t kShown = 80;

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

// Begin of the text after the last "answer is" or "answer:", ignoring case. npos if there is none.
size_t after_answer_is(std::string_view text) {
  constexpr std::string_view kWord = "answer";
  for (size_t i = text.size(); i-- > 0;) {
    const auto continues = [&](std::string_view word, size_t at) {
      return text.size() >= at + word.size() && std::equal(word.begin(), word.end(), text.begin() + at,
                                                           [](char a, char b) { return a == lower(b); });
    };
    if (!continues(kWord, i)) continue;
    for (const std::string_view link : {":", " is"})
      if (continues(link, i + kWord.size())) return i + kWord.size() + link.size();
  }
  return std::string_view::npos;
}

// Length of the sentence: up to a line break, or up to a period, '!' or '?' at the end or before a space.
size_t sentence_length(std::string_view text) {
  // The line break right after "Answer:" is not the end.
  size_t i = std::min(text.find_first_not_of(" \t\r\n*"), text.size());
  for (; i < text.size(); ++i) {
    if (text[i] == '\n') break;
    const bool stop = text[i] == '.' || text[i] == '!' || text[i] == '?';
    if (stop && (i + 1 == text.size() || text[i + 1] == ' ' || text[i + 1] == '\n')) break;
  }
  return i;
}

// Length up to the brace that closes the brace just before `text`. If there is none, the whole length.
size_t braced_length(std::string_view text) {
  size_t depth = 1;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '{') ++depth;
    if (text[i] == '}' && --depth == 0) return i;
  }
  return text.size();
}

// Converts the LaTeX of a number to plain text: \frac{a}{b} and \dfrac become a/b, "{,}" becomes ",", "\$"
// becomes "$", "\!" and "\," are removed.
std::string plain_latex(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const std::string_view rest = text.substr(i);
    if (rest.starts_with("{,}")) {
      out += ',';
      i += 2;
    } else if (rest.starts_with("}{")) {  // between the parts of a \frac
      out += '/';
      ++i;
    } else if (rest.starts_with("\\!") || rest.starts_with("\\,")) {
      ++i;
    } else if (rest.starts_with("\\frac{") || rest.starts_with("\\dfrac{") || rest.starts_with("\\tfrac{")) {
      i += rest.find('{');
    } else if (rest[0] != '\\') {
      out += rest[0];
    }
  }
  return out;
}

std::string shown(std::string_view text) {
  return std::string(text.substr(0, kShown)) + (text.size() > kShown ? "…" : "");
}

// The text after the last '=' of a formula.
std::string_view after_equals(std::string_view text) {
  const size_t equals = text.rfind('=');
  return equals == std::string_view::npos ? text : text.substr(equals + 1);
}

}  // namespace

NumberVerifier::Answer NumberVerifier::find_answer(std::string_view text) const {
  if (const size_t at = text.rfind(kHashes); at != std::string_view::npos) {
    const std::string_view rest = text.substr(at + kHashes.size());
    return {rest.substr(0, rest.find('\n')), "after ####", true};
  }
  if (const size_t at = text.rfind(kBoxed); at != std::string_view::npos) {
    const std::string_view rest = text.substr(at + kBoxed.size());
    return {rest.substr(0, braced_length(rest)), "in \\boxed", true};
  }
  if (const size_t at = after_answer_is(text); at != std::string_view::npos) {
    const std::string_view rest = text.substr(at);
    return {rest.substr(0, sentence_length(rest)), "after 'answer is'", true};
  }
  return {text, "in the completion", false};
}

ExactNumber NumberVerifier::gold(std::string_view answer, std::string_view where) const {
  const size_t hashes = answer.rfind(kHashes);
  const std::string_view text =
      hashes == std::string_view::npos ? answer : answer.substr(hashes + kHashes.size());
  const NumberSpan span = find_number(text, 0, settings_.fractions);
  const auto number = span.length == 0 ? std::nullopt : parse_number(text.substr(span.begin, span.length));
  if (!number || find_number(text, span.begin + span.length, settings_.fractions).length != 0) {
    throw UserError(str(where, ": the answer ", quoted(text),
                        " is not one number, which the verifier of the final ",
                        "number needs; end the answer with '#### 42', or set reward: FILE.py:FUNCTION"));
  }
  return *number;
}

Verdict NumberVerifier::verify(std::string_view completion, const ExactNumber& gold) const {
  const Answer answer = find_answer(completion);
  if (!answer.marked && settings_.require_marker) return {0, "", "no ####, \\boxed or 'the answer is'"};
  std::string plain;
  std::string_view text = answer.text;
  NumberSpan span;
  if (answer.marked) {
    text = after_equals(text);
    if (text.find('\\') != std::string_view::npos || text.find("{,}") != std::string_view::npos) {
      plain = plain_latex(text);
      text = plain;
    }
    span = find_number(text, 0, settings_.fractions);
  } else {
    for (NumberSpan next = find_number(text, 0, settings_.fractions); next.length != 0;
         next = find_number(text, next.begin + next.length, settings_.fractions)) {
      span = next;
    }
  }
  if (span.length == 0) return {0, "", str("no number ", answer.place)};
  const std::string_view written = text.substr(span.begin, span.length);
  const auto number = parse_number(written);
  if (!number) return {0, shown(written), str(shown(written), " has no exact value")};
  if (*number == gold) return {1, shown(written), "correct"};
  return {0, shown(written), str(shown(written), " is not the answer")};
}

}  // namespace bough

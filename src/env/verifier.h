// The verifier of the final number: is the last answer of a completion the reference number?
//
// The answer is in the first of these places that the completion has. The last occurrence counts, because a
// model may correct itself. (A model that continues with another question needs a stop string.)
//   1. "#### 42"            GSM8K; up to the end of the line
//   2. "\boxed{42}"         up to the matching brace; \frac{1}{2}, {,} and \$ are understood
//   3. "The answer is 42"   "answer is" or "answer:" in any case; up to the end of the sentence
//   4. the last number      unless a marker is required
// In 1-3 the first number after the last '=' counts ("7 + 5 = 12"). If such a place has no number, there is
// no answer: the verifier does not try the next place. So a model gains nothing by writing several answers.
//
// Numbers are compared exactly (exact_number.h): 1,000 = 1000 = 1000.0 = 1e3, $-5 = -5, 1/2 = 0.5. A percent
// sign or a unit after the number is ignored.
#pragma once

#include <string>
#include <string_view>

#include "base/settings.h"
#include "env/exact_number.h"

namespace bough {

struct VerifierSettings {
  bool require_marker = false;
  bool fractions = true;

  template <class V>
  void visit(V& v) {
    v("require_marker", require_marker, "an answer counts only after ####, \\boxed or 'the answer is'");
    v("fractions", fractions, "read 3/4 as one number, a fraction; false: as two numbers");
  }
};

struct Verdict {
  double score = 0;       // 1 or 0
  std::string extracted;  // the answer as the completion wrote it, at most 80 characters; "" if there is none
  std::string reason;     // one line for people to read: "13 is not the answer", "no number after ####"
};

class NumberVerifier {
 public:
  explicit NumberVerifier(const VerifierSettings& settings = {}) : settings_(settings) {}

  // Returns the reference number of an answer text: the text after its last "####" if it has one, else the
  // whole text. Throws UserError if that is not one number. `where` names the record in the message.
  ExactNumber gold(std::string_view answer, std::string_view where) const;

  // Linear in the completion's length; never throws on content.
  Verdict verify(std::string_view completion, const ExactNumber& gold) const;

 private:
  struct Answer {
    std::string_view text;   // contains the number
    std::string_view place;  // described in words, for the reason
    bool marked;             // true: the first number in `text` counts; false: the last
  };
  Answer find_answer(std::string_view completion) const;

  VerifierSettings settings_;
};

}  // namespace bough

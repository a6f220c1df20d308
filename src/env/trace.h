// The task `trace`: the model executes a short program over a few registers step by step in a long response.
//
//   {"question": "a4b0c9 Ab+3 Bc+b Ca-5",
//    "answer": "Ab+3 0+3=3 a4b3c9\nBc+b 9+3=2 a4b3c2\nCa-5 4-5=9 a9b3c2\n#### 932"}
//
// A register holds one digit. A step adds or subtracts a digit, or adds another register, modulo 10. Each
// step is labelled by a character that occurs nowhere else. Each line of the answer repeats the step,
// computes it and gives the registers after it. The final number is the registers in order.
// - Every line depends on the question's text, far above, and on the line before it.
// - The final number depends on every line: a step is a bijection of the registers, so a single wrong line
//   always changes the number.
// The reward is 1 if the verifier of the final number (verifier.h) accepts the response, else 0.
//
// By default a response has 46 to 60 lines of 22 bytes: 1.0 to 1.3 thousand tokens of a byte-level model. The
// task tests attention that does not see the whole context (docs/sparse.md). Short programs that begin at any
// label (max_first) teach a model to follow steps at a tenth of the cost.
#pragma once

#include <cstdint>
#include <vector>

#include "base/settings.h"
#include "env/sums.h"

namespace bough {

inline constexpr int64_t kTraceLabels = 60;

struct TraceSettings {
  int64_t registers = 5;
  int64_t min_steps = 46;
  int64_t max_steps = 60;
  int64_t max_first = 1;
  double mixing = 0.25;
  double slips = 0;

  template <class V>
  void visit(V& v) {
    v("registers", registers, "number of registers of a program, named a, b, ...", range(2, 16));
    v("min_steps", min_steps, "fewest steps of a program", range(1, kTraceLabels));
    v("max_steps", max_steps, "most steps of a program; the number is uniform from min_steps to max_steps",
      range(1, kTraceLabels));
    v("max_first", max_first, "the first step has one of the first max_first labels, at random",
      range(1, kTraceLabels));
    v("mixing", mixing, "share of the steps that add another register instead of a digit", range(0.0, 1.0));
    v("slips", slips, "share of the steps of worked answers with a wrong digit, which later steps use",
      range(0.0, 1.0));
  }
  void check() const;  // throws UserError if min_steps exceeds max_steps or there are too few labels
};

// Returns the first n problems of a split, each {"question", "answer"} with a different question. A longer
// list begins with the shorter one. The program alone decides the split (sums_split), so splits are disjoint
// for any seeds. The programs do not depend on the setting `slips`. Throws UserError if the settings do not
// allow n different programs.
std::vector<Json> make_trace_problems(int64_t n, Split split, uint64_t seed, const TraceSettings& settings);

}  // namespace bough

// The task `trace`: a short program over a few registers, followed step by step on a long scratchpad.
//
//   {"question": "a4b0c9 Ab+3 Bc+b Ca-5",
//    "answer": "Ab+3 0+3=3 a4b3c9\nBc+b 9+3=2 a4b3c2\nCa-5 4-5=9 a9b3c2\n#### 932"}
//
// A register holds a digit; a step adds or takes off a digit, or adds another register, modulo 10. Steps are
// labelled, each with a character of its own that stands nowhere else. Each line of the answer names the
// step, as the question has it, works it out, and gives the registers after it; the number at the end is the
// registers read in order. So every line needs the question's text far above and the line before it, and the
// number needs every line: a step is a bijection of the registers, and whoever goes wrong once, and not a
// second time, ends with another number. The verifier of the final number is its reward.
//
// A response is as long as the work it takes: by default 46 to 60 lines of 22 bytes, 1.0 to 1.3 thousand
// tokens of a byte-level model. It is meant for attention that does not see all of it (docs/sparse.md).
// Short programs whose first label is any (max_first) teach a model to follow steps at a tenth of the cost.
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
    v("registers", registers, "registers of a program, named from a on", range(2, 16));
    v("min_steps", min_steps, "fewest steps of a program", range(1, kTraceLabels));
    v("max_steps", max_steps, "most steps of a program; uniform between the two", range(1, kTraceLabels));
    v("max_first", max_first, "the first step's label is one of the first so many", range(1, kTraceLabels));
    v("mixing", mixing, "share of the steps that add another register, not a digit", range(0.0, 1.0));
    v("slips", slips, "share of the steps of worked answers whose digit is wrong, and carried on",
      range(0.0, 1.0));
  }
  void check() const;  // UserError: min above max, or more steps than there are labels for
};

// The first n problems of a split, {"question", "answer"}, no two with the same question; a longer list
// begins with the shorter one. The program decides the split (sums_split): the splits are disjoint, whatever
// the seeds. Programs do not depend on the slips. UserError when the settings do not allow n different
// programs.
std::vector<Json> make_trace_problems(int64_t n, Split split, uint64_t seed, const TraceSettings& settings);

}  // namespace bough

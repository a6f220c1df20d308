// The task `sums`: arithmetic word problems in GSM8K's format, made from a seed.
//
//   {"question": "Tom has 7 figs and gets 5 more. How many figs now?", "answer": "7+5=12 #### 12"}
//
// It is the smallest task that has all that RL on reasoning needs: a worked answer, a verifiable number,
// held-out problems and a difficulty that is set. Texts are short because every byte is a token of a
// byte-level model.
//
// A problem is a chain of operations on small whole numbers, told in one of several wordings about some name
// and object. The splits are disjoint by construction: a hash of (wording, operations, operands) alone
// decides whether a problem is train, test or a worked example. So no test question occurs in train, whatever
// the seeds, not even with another name or other objects. (The sum 7+5 itself may: in another wording.)
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/settings.h"
#include "data/problems.h"

namespace bough {

struct SumsSettings {
  int64_t min_operand = 1;
  int64_t max_operand = 20;
  int64_t min_steps = 1;
  int64_t max_steps = 1;
  std::vector<std::string> operations = {"add", "subtract"};
  int64_t shots = 0;
  double slips = 0;

  template <class V>
  void visit(V& v) {
    v("min_operand", min_operand, "smallest number in a question", range(1, 1'000'000));
    v("max_operand", max_operand, "largest number in a question", range(1, 1'000'000));
    v("min_steps", min_steps, "fewest operations of a problem", range(1, 8));
    v("max_steps", max_steps, "most operations of a problem; uniform between the two", range(1, 8));
    v("operations", operations, "which ones; multiply only as the first of a problem",
      one_of({"add", "subtract", "multiply"}));
    v("slips", slips,
      "share of worked answers whose last result is off by one to three: demonstrations as imperfect as text "
      "is",
      range(0.0, 1.0));
    v("shots", shots, "worked examples in front of every question, the same for the whole data set",
      range(0, 64));
  }
  void check() const;  // UserError: min above max, no operation, more than one step of multiply alone
};

// `example` is what few-shot prompts are made of.
enum class Split { train, test, example };

struct SumsProblem {
  std::string question;
  std::string answer;  // "7+5=12 12-3=9 #### 9"; wrong where settings.slips has it so
  std::string
      skeleton;  // wording, operations and operands: what decides the split; 7+5 and 5+7 have the same
};

// The split of a skeleton: 20% test, 2% example, the rest train.
Split sums_split(const std::string& skeleton);

// The first n problems of a split, no two with the same question; a longer list begins with the shorter one.
// UserError when the settings do not allow n different problems. settings.shots plays no part.
std::vector<SumsProblem> make_sums(int64_t n, Split split, uint64_t seed, const SumsSettings& settings);

// Writes JSON Lines. Without shots: {"question", "answer"}. With shots: {"prompt", "question", "answer"}, the
// prompt being the same worked examples for the whole file and then the question, in PromptLayout's defaults
// (prompt.h).
void write_sums_dataset(const std::filesystem::path& path, int64_t n, Split split, uint64_t seed,
                        const SumsSettings& settings);

}  // namespace bough

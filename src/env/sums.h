// The task `sums`: arithmetic word problems in GSM8K's format, made from a seed.
//
//   {"question": "Tom has 7 figs and gets 5 more. How many figs now?", "answer": "7+5=12 #### 12"}
//
// The smallest task with all that RL on reasoning needs: a worked answer, a verifiable number, held-out
// problems and an adjustable difficulty. Texts are short, because byte-level models have one token per byte.
//
// A problem is a chain of operations on small whole numbers, told in one of several wordings about some name
// and object. A hash of (wording, operations, operands) alone decides the split. So for any seeds, no test
// question occurs in train, not even with another name or other objects. (The sum 7+5 itself may occur in
// both, in different wordings.)
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
    v("max_steps", max_steps,
      "most operations of a problem; the number is uniform from min_steps to max_steps", range(1, 8));
    v("operations", operations, "allowed operations; multiply is used only as the first of a problem",
      one_of({"add", "subtract", "multiply"}));
    v("slips", slips, "share of worked answers whose last result is wrong by one to three", range(0.0, 1.0));
    v("shots", shots, "number of worked examples before every question, the same ones for the whole data set",
      range(0, 64));
  }
  // Throws UserError if a minimum exceeds its maximum, if there is no operation, or if multiply is the only
  // one and max_steps is above 1.
  void check() const;
};

// Few-shot prompts are made of the split `example`.
enum class Split { train, test, example };

struct SumsProblem {
  std::string question;
  std::string answer;    // "7+5=12 12-3=9 #### 9"; wrong for a share settings.slips of the problems
  std::string skeleton;  // wording, operations and operands, which decide the split; the same for 7+5 and 5+7
};

// Returns the split of a skeleton: 20% test, 2% example, the rest train.
Split sums_split(const std::string& skeleton);

// Returns the first n problems of a split, all with different questions. A longer list begins with the
// shorter one. Throws UserError if the settings do not allow n different problems. Ignores settings.shots.
std::vector<SumsProblem> make_sums(int64_t n, Split split, uint64_t seed, const SumsSettings& settings);

// Writes JSON Lines. Without shots: {"question", "answer"}. With shots: {"prompt", "question", "answer"}. The
// prompt then has the same worked examples for the whole file, followed by the question, in the default
// PromptLayout (prompt_layout.h).
void write_sums_dataset(const std::filesystem::path& path, int64_t n, Split split, uint64_t seed,
                        const SumsSettings& settings);

}  // namespace bough

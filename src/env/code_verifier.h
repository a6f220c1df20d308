// The reward of a program: does it pass the problem's tests?
//
// The program is the content of the last ``` fence in the completion that names the language of the settings.
// If there is none, it is the last fence without a language. If there is none either, it is the whole
// completion. It runs in a sandbox (sandbox.h).
//
// The problem has the tests, in the usual fields of data sets (docs/verifiers.md):
//   inputs and outputs   text for stdin and the expected stdout, each pair in a run of its own. Spaces at the
//                        ends of lines and empty lines at the end are ignored. The expected text never
//                        enters the sandbox.
//   calls                a function, arguments and the expected result, as JSON
//   asserts              Python statements that call functions of the program
// Calls and asserts run in another sandbox than the program, so the program cannot forge a result
// (code_test_scripts.h).
//
// If the program fails, hangs or is killed, the reward is 0. If a sandbox cannot be made, or the tests cannot
// be run, the reward fails (reward.h).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/settings.h"
#include "data/problems.h"
#include "env/sandbox.h"

namespace bough {

class RewardFunction;

struct CodeVerifierOptions {
  std::string score = "all";
  std::string language = "python";
  std::vector<std::string> interpreter;
  std::string python;
  double timeout_seconds = 6;
  double total_timeout_seconds = 60;
  int64_t max_tests = 1000;
  std::optional<double> tolerance;
  SandboxSettings sandbox;
  // Copied from the settings of the reward service.
  int64_t workers = 1;                   // completions that each caller tests at the same time
  std::optional<double> failure_reward;  // the reward if tests cannot be run

  template <class V>
  void visit(V& v) {
    v("score", score, "all: 1 if every test passes, else 0; fraction: the share of the tests that pass",
      one_of({"all", "fraction"}));
    v("language", language,
      "language of the fenced block with the program; python also accepts py and python3", not_empty());
    v("interpreter", interpreter,
      "command that runs a program file for tests of stdin and stdout; empty: the setting python");
    v("python", python,
      "Python interpreter of programs and of tests that call functions; empty: python3 in /usr");
    v("timeout_seconds", timeout_seconds, "time limit of one test, in seconds", range(0.05, 3600));
    v("total_timeout_seconds", total_timeout_seconds, "time limit of all tests of one completion, in seconds",
      range(0.05, 86400));
    v("max_tests", max_tests,
      "maximum tests of each kind (stdin, calls, asserts) that run for a problem, the first ones",
      range(1, 1'000'000));
    v("tolerance", tolerance,
      "allowed difference of numbers, relative or absolute; null: outputs are compared as text");
    v("sandbox", sandbox, "limits of a program, and the fallback if no sandbox can be made");
  }
};

// The tests of a problem, in one form for all data sets.
struct CodeTests {
  struct Run {
    std::string input;
    std::string output;
  };
  std::vector<Run> runs;
  Json calls = Json::array();  // each {name, args, expected, wrapped}; wrapped: `expected` may be [result]
  std::vector<std::string> asserts;
  std::string setup;   // Python code that runs before the asserts
  Json check;          // {code, entry}: HumanEval's check(candidate); null: none
  std::string prefix;  // code in the prompt that a completion may continue; only with `check`

  size_t size() const { return runs.size() + calls.size() + asserts.size() + (check.is_null() ? 0 : 1); }
};

// Throws UserError if the problem has no tests or an unknown form of tests. The message names no record;
// callers add it.
CodeTests read_code_tests(const Problem& problem);

// Returns the program in a completion.
std::string extract_program(std::string_view completion, const std::string& language);

// Whether `printed` is the expected output. With `tolerance`, two numbers a and b count as equal if they
// differ by at most tolerance * max(1, |a|, |b|).
bool same_output(std::string_view printed, std::string_view expected, std::optional<double> tolerance);

// Throws UserError if no sandbox can be made and programs may not run without one, or if the sandbox has no
// interpreter. check() throws UserError for problems without tests.
std::unique_ptr<RewardFunction> make_code_reward(const CodeVerifierOptions& options);

}  // namespace bough

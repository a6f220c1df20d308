// The reward of a program: does it pass the problem's tests?
//
// The program is what stands in the last ``` fence of the completion whose language is the setting's (or that
// names none); without a fence, all of the completion. It is run in a sandbox (sandbox.h).
//
// Tests come with the problem, in the fields that data sets have for them (docs/verifiers.md):
//   inputs and outputs   text for stdin, and what must come out of stdout: lines without the spaces at their
//                        ends, and without empty lines at the end. Each in a run of its own. The expected
//                        text never enters the sandbox.
//   calls                a function, arguments and the expected result, as JSON
//   asserts              Python statements that call functions of the program
// Calls and asserts run in another sandbox than the program (code_test_scripts.h): it cannot forge a verdict.
//
// A program that fails, hangs or is killed has reward 0. A sandbox that cannot be made, or tests that cannot
// be run, are failed rewards.
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
  // Of the reward service, and no settings of their own.
  int64_t workers = 1;                   // completions that are tested at the same time, by each caller
  std::optional<double> failure_reward;  // where tests cannot be run

  template <class V>
  void visit(V& v) {
    v("score", score, "all: 1 if every test passes, else 0; fraction: the part that passes",
      one_of({"all", "fraction"}));
    v("language", language, "of the fence that holds the program; python also takes py and python3",
      not_empty());
    v("interpreter", interpreter,
      "command that runs a program for tests of stdin and stdout, before the file's name; empty: python");
    v("python", python, "interpreter of programs and of tests of functions; empty: python3 in /usr");
    v("timeout_seconds", timeout_seconds, "limit of one test", range(0.05, 3600));
    v("total_timeout_seconds", total_timeout_seconds, "limit of all tests of one completion",
      range(0.05, 86400));
    v("max_tests", max_tests, "of a problem's tests so many are run, the first ones", range(1, 1'000'000));
    v("tolerance", tolerance, "numbers may differ by so much, relative or absolute; null: compared as text");
    v("sandbox", sandbox, "limits of a program, and what may be done where no sandbox can be made");
  }
};

// The tests of a problem, whatever form its data set has.
struct CodeTests {
  struct Run {
    std::string input;
    std::string output;
  };
  std::vector<Run> runs;
  Json calls = Json::array();  // of {name, args, expected, wrapped}
  std::vector<std::string> asserts;
  std::string setup;   // Python that stands before the asserts
  Json check;          // {code, entry}: HumanEval's check(candidate); null: none
  std::string prefix;  // code of the prompt, which a completion may continue; needs check

  size_t size() const { return runs.size() + calls.size() + asserts.size() + (check.is_null() ? 0 : 1); }
};

// UserError without a place: no tests, or a form that is not read.
CodeTests read_code_tests(const Problem& problem);

// The program of a completion.
std::string extract_program(std::string_view completion, const std::string& language);

// Is `printed` what was expected? Numbers by tolerance where that is set.
bool same_output(std::string_view printed, std::string_view expected, std::optional<double> tolerance);

// UserError: no sandbox can be made here and none may be left out, or no interpreter is in it. check()
// refuses problems without tests.
std::unique_ptr<RewardFunction> make_code_reward(const CodeVerifierOptions& options);

}  // namespace bough

#include "env/code_verifier.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "base/error.h"
#include "env/env_test_util.h"
#include "env/reward.h"

namespace bough {
namespace {

Problem problem_of(const char* fields) {
  Problem problem;
  problem.id = "p";
  problem.fields = parse_json(fields, "test");
  return problem;
}

RewardResult reward(const std::string& completion, const Problem& problem, CodeVerifierOptions options = {}) {
  return make_code_reward(options)->score({"", completion, &problem});
}

const char* kSum = R"json({"input_output": {"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]}})json";
const char* kAdd = R"json({"test_list": ["assert add(1, 2) == 3", "assert add(5, 6) == 11"]})json";
const char* kTwoSum =
    R"json({"metadata": "{\"func_name\": \"twoSum\"}", "public_test_cases":
            "[{\"input\": \"[2,7]\\n9\", \"output\": \"[0,1]\", \"testtype\": \"functional\"}]"})json";
const char* kHumanEval =
    R"json({"prompt": "def helper(x):\n    return x + 1\n\ndef twice(x):\n    \"\"\"Twice.\"\"\"\n",
            "entry_point": "twice",
            "test": "def check(f):\n    assert f(2) == 4\n    assert helper(f(3)) == 7\n"})json";

TEST(ExtractProgram, TakesTheLastFence) {
  EXPECT_EQ(extract_program("a\n```python\nx\n```\nb\n```python\ny\n```\n", "python"), "y\n");
  EXPECT_EQ(extract_program("```py\nx\n```\n```\nout\n```\n", "python"),
            "x\n");  // a named block takes precedence over a block without a name
  EXPECT_EQ(extract_program("```\nx\n```\n```c\ny\n```", "python"), "x\n");
  EXPECT_EQ(extract_program("```ruby\nx\n```", "ruby"), "x\n");
  EXPECT_EQ(extract_program("```python\nx = 1", "python"), "x = 1");  // cut off
  EXPECT_EQ(extract_program("print(1)", "python"), "print(1)");
  EXPECT_EQ(extract_program("", "python"), "");
}

TEST(SameOutput, ComparesTrimmedLines) {
  EXPECT_TRUE(same_output("1 2 \r\n3\n\n\n", "1 2\n 3", {}));
  EXPECT_FALSE(same_output("1 2\n\n3", "1 2\n3", {}));
  EXPECT_FALSE(same_output("1  2", "1 2", {}));
  EXPECT_FALSE(same_output("0.3333", "0.33333", {}));
  EXPECT_TRUE(same_output("0.3333 x", "0.33333  x", 1e-3));
  EXPECT_FALSE(same_output("0.3333", "0.35", 1e-3));
  EXPECT_FALSE(same_output("nan", "1", 1e-3));
  EXPECT_FALSE(same_output("", "1", 1e-3));
  EXPECT_TRUE(same_output("\n", "", {}));
}

TEST(CodeTests, UnknownFormsAreUserErrors) {
  for (const char* fields :
       {R"json({})json", R"json({"tests": []})json",
        R"json({"input_output": {"inputs": ["1"], "outputs": []}})json",
        R"json({"private_test_cases": "eJxrYJmq"})json", R"json({"tests": [{"input": "1"}]})json",
        R"json({"tests": 3})json",
        R"json({"tests": [{"input": "1", "output": "1", "testtype": "functional"}]})json"}) {
    EXPECT_THROW(read_code_tests(problem_of(fields)), UserError) << fields;
  }
}

struct Case {
  const char* problem;
  const char* completion;
  double reward;
};

class CodeCases : public testing::TestWithParam<Case> {};

TEST_P(CodeCases, Scores) {
  NEEDS_SANDBOX();
  const auto [fields, completion, expected] = GetParam();
  const RewardResult result = reward(completion, problem_of(fields));
  EXPECT_FALSE(result.failed) << result.message;
  EXPECT_EQ(result.reward, expected) << completion << "\n" << result.message;
}

INSTANTIATE_TEST_SUITE_P(
    Forms, CodeCases,
    testing::Values(
        Case{kSum, "So:\n```python\nprint(sum(map(int, input().split())))\n```", 1},
        Case{kSum, "```python\nprint(3)\n```", 0}, Case{kSum, "I do not know", 0}, Case{kSum, "", 0},
        Case{kSum, "print(sum(map(int, input().split()))); exit(1)", 0},
        Case{kAdd, "```python\ndef add(a, b):\n    return a + b\n```", 1},
        Case{kAdd, "def add(a, b): return a - b", 0}, Case{kAdd, "def sub(a, b): return a + b", 0},
        Case{kTwoSum,
             "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n"
             "        return (0, 1)",
             1},
        Case{kTwoSum, "def twoSum(nums, target): return [1, 0]", 0},
        Case{kHumanEval, "    return 2 * x\n", 1},                               // continues the prompt
        Case{kHumanEval, "```python\ndef twice(x):\n    return x + x\n```", 1},  // writes the whole function
        Case{kHumanEval, "    return 3 * x\n", 0},
        // Types are kept: a tuple is not equal to a list, an iterator not to a list, and a set has no order.
        Case{R"json({"tests": ["assert f() == (1, [2.5, None], {3}, {'a': b'x'})"]})json",
             "def f(): return (1, [2.5, None], {3}, {'a': b'x'})", 1},
        Case{R"json({"tests": ["assert f() == [1, 2]"]})json", "def f(): return (1, 2)", 0},
        Case{R"json({"tests": ["assert f() == [1, 2]"]})json", "def f(): yield from (1, 2)", 0},
        Case{R"json({"tests": ["assert list(f()) == [1, 2]"]})json", "def f(): yield from (1, 2)", 1},
        Case{R"json({"tests": ["assert math.isclose(f(), 0.5)"]})json", "def f(): return 0.5", 1},
        Case{R"json({"tests": ["try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass"]})json",
             "def f(x): raise ValueError('no')", 1},
        // Objects of the program's own classes: MBPP's Pair and Node.
        Case{R"json({"test_list": ["assert longest([Pair(1, 2), Pair(3, 4)]) == 2"]})json",
             "class Pair:\n    def __init__(self, a, b): self.a = a\n"
             "def longest(pairs): return sum(type(p) is Pair for p in pairs)",
             1},
        Case{
            R"json({"test_setup_code": "root = Node(1)\nroot.left = Node(2)",
                     "test_list": ["assert f(root) == 2"]})json",
            "class Node:\n    def __init__(self, v): self.v = v\ndef f(node): return node.left.v", 1},
        Case{R"json({"public_tests": {"input": ["3 4"], "output": ["7"]}})json",
             "print(sum(map(int, input().split())))", 1},
        // APPS wraps results in a list.
        Case{R"json({"input_output": "{\"fn_name\": \"f\", \"inputs\": [[3]], \"outputs\": [[9]]}"})json",
             "def f(x): return x * x", 1}));

// The program must not be able to report that it passed. Each of these programs passes in a harness that runs
// the tests in the program's process, or trusts its exit status or its output.
INSTANTIATE_TEST_SUITE_P(
    Forgeries, CodeCases,
    testing::Values(
        Case{kAdd, "import sys; sys.exit(0)", 0}, Case{kAdd, "import os; os._exit(0)", 0},
        Case{kAdd, "import atexit, os\ndef add(a, b): os._exit(0)", 0},
        Case{kAdd,
             "print('{\"passed\": [true, true], \"message\": \"\"}', flush=True)\nimport os; os._exit(0)", 0},
        Case{kAdd, "import os\nos.write(3, b'{\"names\": [\"add\"]}\\n{\"passed\": [true, true]}\\n' * 9)",
             0},
        Case{kAdd,
             "class Any:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
             "def add(a, b): return Any()",
             0},
        Case{kAdd, "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any(7)",
             0},
        Case{kAdd, "class Any(list):\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
             0},
        Case{R"json({"tests": ["assert f(1)"]})json", "def f(x): return object()", 0},
        Case{R"json({"tests": ["assert f(1) != 2"]})json", "class A: pass\ndef f(x): return A()", 0},
        Case{R"json({"tests": ["assert all(x == 1 for x in f(1))"]})json",
             "def f(x): return [2]\ndef all(x): return True", 0},
        Case{R"json({"tests": ["assert set(f(1)) == set([1])"]})json",
             "def f(x): return [2]\ndef set(x): return 1", 0},
        Case{R"json({"tests": ["assert math.isclose(f(1), 2)"]})json",
             "def f(x): return 3\nclass math:\n    isclose = staticmethod(lambda *a: True)", 0},
        Case{R"json({"tests": ["assert pow(2, 3) == 8"]})json", "def pow(a, b): return 0",
             0},  // does not test the program
        Case{kAdd,
             "import builtins, sys, json\nbuiltins.AssertionError = Exception\n"
             "sys.settrace(lambda *a: None)\njson.dumps = lambda *a, **k: '{\"value\": true}'\n"
             "def add(a, b): return True",
             0},
        Case{kAdd,
             "import gc, sys\nfor o in gc.get_objects():\n    if isinstance(o, dict) and 'asserts' in o: "
             "o.clear()\n",
             0},
        Case{kAdd, "open('tests.json', 'w').write('{}')\nopen('/proc/self/fd/1', 'w').write('passed')", 0},
        Case{kAdd, "def add(a, b):\n    raise SystemExit(0)", 0},
        Case{kAdd, "def add(a, b):\n    raise KeyboardInterrupt", 0},
        Case{kHumanEval, "import os; os._exit(0)", 0},
        Case{R"json({"tests": ["assert len(list(f())) < 3"]})json", "def f(): return range(10**12)", 0},
        Case{R"json({"tests": ["assert f() == 1"]})json", "def f(): return [[]] * (3 * 10**6)", 0},
        Case{R"json({"tests": ["assert f() == 1"]})json",
             "import os\nos.write(3, b'[' * 10**6 + b'\\n')\nos._exit(0)", 0},
        Case{kSum, "import os; os.execv('/bin/true', ['true'])", 0}));

// A program that hangs is stopped at its limit and counts as wrong, not as failed. Otherwise hanging would
// remove bad samples from training.
TEST(CodeVerifier, HangingProgramsScoreZero) {
  NEEDS_SANDBOX();
  CodeVerifierOptions options;
  options.timeout_seconds = 0.4;
  options.total_timeout_seconds = 1;
  const auto begin = std::chrono::steady_clock::now();
  for (const char* program :
       {"while True: pass", "def add(a, b):\n    while True: pass",
        "import time\ndef add(a, b): time.sleep(1000)",
        "import os, time\nwhile True:\n    os.write(3, b' '); time.sleep(0.01)",
        "import signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except Exception: pass\nwhile True: time.sleep(1)"}) {
    const RewardResult result = reward(program, problem_of(kAdd), options);
    EXPECT_FALSE(result.failed) << result.message;
    EXPECT_EQ(result.reward, 0) << program;
  }
  const RewardResult loop = reward("while True: pass", problem_of(kSum), options);
  EXPECT_EQ(loop.message, "test 1: the program took longer than 0.4 s");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

TEST(CodeVerifier, ScoreIsTheFractionOfPassedTests) {
  NEEDS_SANDBOX();
  CodeVerifierOptions options;
  options.score = "fraction";
  EXPECT_EQ(reward("print(3)", problem_of(kSum), options).reward, 0.5);
  EXPECT_EQ(reward("def add(a, b): return 11", problem_of(kAdd), options).reward, 0.5);
  const RewardResult result =
      reward("def add(a, b): return a + b if a == 1 else 1 / 0", problem_of(kAdd), options);
  EXPECT_EQ(result.reward, 0.5);
  EXPECT_EQ(result.message,
            "test 2: ZeroDivisionError: ZeroDivisionError: division by zero, 1 of 2 tests passed");
}

TEST(CodeVerifier, RunsWithoutASandboxOnlyIfAllowed) {
  CodeVerifierOptions options;
  options.sandbox.bubblewrap = "/nowhere/bwrap";
  EXPECT_THROW(make_code_reward(options), UserError);
  options.sandbox.allow_unsandboxed = true;
  options.timeout_seconds = 3;
  const auto verifier = make_code_reward(options);
  const Problem sum = problem_of(kSum), add = problem_of(kAdd);
  EXPECT_EQ(verifier->score({"", "print(sum(map(int, input().split())))", &sum}).reward, 1);
  EXPECT_EQ(verifier->score({"", "def add(a, b): return a + b", &add}).reward, 1);
  EXPECT_EQ(verifier->score({"", "def add(a, b): return a - b", &add}).reward, 0);
  EXPECT_EQ(verifier->score({"", "import os; os._exit(0)", &add}).reward, 0);
}

TEST(CodeVerifier, InvalidPythonTestsFailTheReward) {
  NEEDS_SANDBOX();
  const RewardResult result =
      reward("def f(): return 1", problem_of(R"json({"tests": ["assert f( == 1"]})json"));
  EXPECT_TRUE(result.failed);
  EXPECT_FALSE(result.valid);
  EXPECT_NE(result.message.find("the tests are not valid Python"), std::string::npos) << result.message;
}

TEST(CodeVerifier, AnyInterpreter) {
  NEEDS_SANDBOX();
  CodeVerifierOptions options;
  options.language = "sh";
  options.interpreter = {"/bin/sh"};
  const auto verifier = make_code_reward(options);
  const Problem sum = problem_of(kSum), add = problem_of(kAdd);
  EXPECT_EQ(verifier->score({"", "```sh\nread a b; echo $((a + b))\n```", &sum}).reward, 1);
  EXPECT_NO_THROW(verifier->check(Dataset({sum}, "data.jsonl")));
  EXPECT_THROW(verifier->check(Dataset({add}, "data.jsonl")), UserError);
  options.interpreter = {"no-such-program"};
  EXPECT_THROW(make_code_reward(options), UserError);
}

TEST(CodeVerifier, ADataSetWithoutTestsIsRefusedAtTheStart) {
  NEEDS_SANDBOX();
  Problem problem;
  problem.id = "7";
  try {
    make_code_reward({})->check(Dataset({problem}, "data.jsonl"));
    FAIL();
  } catch (const UserError& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("data.jsonl: problem '7': no tests")) << error.what();
  }
}

TEST(CodeVerifier, ThreeProblemsFromSeveralThreads) {
  NEEDS_SANDBOX();
  CodeVerifierOptions options;
  options.workers = 2;
  const auto verifier = make_code_reward(options);
  const std::vector<Problem> problems{problem_of(kSum), problem_of(kAdd), problem_of(kTwoSum)};
  const std::vector<std::string> completions{"print(sum(map(int, input().split())))",
                                             "def add(a, b): return a + b", "def twoSum(n, t): return []"};
  std::vector<RewardRequest> requests;
  for (size_t i = 0; i < problems.size(); ++i) requests.push_back({"", completions[i], &problems[i]});
  std::vector<std::jthread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&] {
      const auto results = verifier->score_all(requests);
      ASSERT_EQ(results.size(), 3u);
      EXPECT_EQ(results[0].reward, 1) << results[0].message;
      EXPECT_EQ(results[1].reward, 1) << results[1].message;
      EXPECT_EQ(results[2].reward, 0);
      EXPECT_EQ(results[2].message, "test 1: AssertionError: got [], expected [0, 1]");
    });
}

}  // namespace
}  // namespace bough

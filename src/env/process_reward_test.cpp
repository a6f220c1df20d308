#include "env/process_reward.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <fstream>
#include <future>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "env/env_test_util.h"

namespace bough {
namespace {

class ProcessReward : public testing::Test {
 protected:
  ProcessReward()
      : folder_(std::filesystem::path(testing::TempDir()) / str("bough_process_reward_", getpid())) {
    std::filesystem::create_directories(folder_);
    settings_.workers = 2;
    settings_.timeout_seconds = 30;  // on a loaded machine slow calls must not fail
    settings_.retries = 0;
  }
  ~ProcessReward() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& code, const std::string& name = "my_reward.py") {
    std::ofstream(folder_ / name) << code;
    return (folder_ / name).string() + ":score";
  }
  std::unique_ptr<RewardPool> load(const std::string& code, PoolTime time = {}) {
    return make_python_reward(write(code), settings_, time);
  }
  PoolTime fake_time() const { return {.clock = &clock_, .longest_poll = std::chrono::milliseconds(1)}; }
  void wait_for_file(const std::string& name) const {
    while (!std::filesystem::exists(folder_ / name))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  // A command that runs `code`. In it, answer(id, reward) writes a reply.
  std::unique_ptr<RewardPool> command(const std::string& code, bool ready_line = false) {
    std::ofstream(folder_ / "judge.py")
        << "import json, os, sys, time\n"
           "def write(text): sys.stdout.write(text); sys.stdout.flush()\n"
           "def answer(id, reward): write(json.dumps({'id': id, 'reward': reward}) + '\\n')\n"
        << code;
    return make_command_reward("exec python3 '" + (folder_ / "judge.py").string() + "'", ready_line,
                               settings_);
  }
  // Scores each completion by a call of its own.
  std::vector<RewardResult> score(RewardPool& reward, const std::vector<std::string>& completions) {
    std::vector<RewardRequest> requests;
    for (const std::string& completion : completions)
      requests.push_back({"the prompt", completion, &problem_});
    return reward.score_all(requests);
  }
  std::string error_of(const std::string& code) {
    try {
      load(code);
    } catch (const UserError& error) {
      return error.what();
    }
    return "no error";
  }
  void expect_failure(const RewardResult& result, const std::string& message) {
    EXPECT_TRUE(result.failed);
    EXPECT_EQ(result.reward, settings_.failure_reward.value_or(0));
    EXPECT_EQ(result.valid, settings_.failure_reward.has_value());
    EXPECT_NE(result.message.find(message), std::string::npos)
        << "got: " << result.message << "\nexpected: " << message;
  }

  std::filesystem::path folder_;
  FakeClock clock_;
  RewardSettings settings_;
  Problem problem_{"1", "", {}, "#### 4", {{"answer", "#### 4"}, {"level", 3}, {"tags", {"a", "b"}}}};
};

TEST_F(ProcessReward, GetsPromptCompletionAndFields) {
  const auto reward = load(
      "def score(prompt, completion, **fields):\n"
      "    assert prompt == 'the prompt' and fields == {'answer': '#### 4', 'level': 3, 'tags': ['a', 'b']}, "
      "fields\n"
      "    return len(completion) + 0.5\n");
  const auto results = score(*reward, {"abc", ""});
  EXPECT_FALSE(results[0].failed) << results[0].message;
  EXPECT_EQ(results[0].reward, 3.5);
  EXPECT_EQ(results[1].reward, 0.5);
  EXPECT_TRUE(score(*reward, {}).empty());
}

TEST_F(ProcessReward, AFunctionGetsOnlyWhatItNames) {
  const auto reward = load("def score(completion, level):\n    return level if completion == 'c' else 0\n");
  EXPECT_EQ(score(*reward, {"c"})[0].reward, 3);
}

TEST_F(ProcessReward, ResultsKeepTheOrderAndWorkersRunTogether) {
  settings_.workers = 4;
  // Each of the first four calls waits until all four have begun, so every worker is used. The four calls
  // then end in reverse order.
  const auto reward = load(
      "import os, time\n"
      "def score(completion, **_):\n"
      "    i = int(completion)\n"
      "    open(f'" +
      folder_.string() +
      "/seen{i}', 'w').close()\n"
      "    while i < 4 and not all(os.path.exists(f'" +
      folder_.string() +
      "/seen{j}') for j in range(4)):\n"
      "        time.sleep(0.01)\n"
      "    time.sleep(0.05 * (4 - i) if i < 4 else 0)\n"
      "    return i\n");
  std::vector<std::string> completions;
  for (int i = 0; i < 40; ++i) completions.push_back(std::to_string(i));
  const auto results = score(*reward, completions);
  for (int i = 0; i < 40; ++i) EXPECT_EQ(results[i].reward, i) << results[i].message;
  EXPECT_EQ(reward->num_restarts(), 0);
}

TEST_F(ProcessReward, PrintingAndReadingDoNotDisturbTheProtocol) {
  const auto reward = load(
      "import os, sys, subprocess\n"
      "print('{\"ready\": false, \"error\": \"printed\"}')\n"
      "def score(completion, **_):\n"
      "    print('{\"id\": 0, \"reward\": 7}', flush=True)\n"
      "    os.write(1, b'{\"id\": 0, \"reward\": 8}\\n')\n"
      "    subprocess.run(['sh', '-c', 'echo noise'])\n"
      "    assert sys.stdin.read() == ''\n"
      "    return 1\n");
  for (const auto& result : score(*reward, {"a", "b", "c"})) EXPECT_EQ(result.reward, 1) << result.message;
}

TEST_F(ProcessReward, ExceptionsAreFailuresWithMessageAndLine) {
  settings_.failure_reward = -1;
  const auto reward = load(
      "import sys\n"
      "class Odd(Exception):\n"
      "    def __str__(self): raise RuntimeError\n"
      "def helper(what):\n"
      "    if what == 'value': raise ValueError('no number in it')\n"
      "    if what == 'exit': sys.exit(3)\n"
      "    if what == 'interrupt': raise KeyboardInterrupt\n"
      "    if what == 'odd': raise Odd\n"
      "    if what == 'surrogate': raise ValueError('\\udcff\\n')\n"
      "    if what == 'deep': helper(what)\n"
      "    if what == 'long': raise ValueError('x' * 10**7)\n"
      "    return 1\n"
      "def score(completion, **_): return helper(completion)\n");
  const auto results =
      score(*reward, {"value", "exit", "interrupt", "odd", "surrogate", "deep", "long", "fine"});
  expect_failure(results[0], "my_reward.py:score: ValueError: no number in it (my_reward.py, line 5)");
  expect_failure(results[1], "SystemExit: 3");
  expect_failure(results[2], "KeyboardInterrupt");
  expect_failure(results[3], "Odd: (its message cannot be shown)");
  expect_failure(results[4], "ValueError: ?");
  expect_failure(results[5], "RecursionError");
  expect_failure(results[6], "ValueError: xxx");
  EXPECT_LT(results[6].message.size(), 1500u);
  EXPECT_EQ(results[7].reward, 1);
  EXPECT_EQ(count_failures(results), 7);
  EXPECT_EQ(reward->num_restarts(), 0);
}

TEST_F(ProcessReward, OnlyFiniteNumbersAreRewards) {
  const auto reward = load(
      "class Scalar:\n"
      "    def __float__(self): return 0.25\n"
      "def score(completion, **_): return eval(completion)\n");
  const auto results = score(*reward, {"True", "3", "Scalar()", "None", "'1'", "float('nan')",
                                       "float('-inf')", "10**400", "[1]", "1j"});
  EXPECT_EQ(results[0].reward, 1);
  EXPECT_EQ(results[1].reward, 3);
  EXPECT_EQ(results[2].reward, 0.25);
  expect_failure(results[3], "TypeError: score returned None (NoneType), expected a number");
  expect_failure(results[4], "score returned '1' (str), expected a number");
  expect_failure(results[5], "ValueError: score returned nan, expected a finite number");
  expect_failure(results[6], "score returned -inf, expected a finite number");
  expect_failure(results[7], "OverflowError");
  expect_failure(results[8], "score returned [1] (list), expected a number");
  expect_failure(results[9], "score returned 1j (complex), expected a number");
}

TEST_F(ProcessReward, AHangIsCutOffAndItsWorkerStartedAnew) {
  settings_.timeout_seconds = 1;
  const auto reward = load(
      "import os, signal\n"
      "def score(completion, **_):\n"
      "    if completion not in 'abc': open('" +
          folder_.string() +
          "/' + completion, 'w').close()\n"
          "    while 'hang' in completion: pass\n"
          "    if completion == 'stop': os.kill(os.getpid(), signal.SIGSTOP)\n"
          "    return 1\n",
      fake_time());
  const auto expect_fine = [&](const std::string& completion) {
    const RewardResult result = score(*reward, {completion})[0];
    EXPECT_EQ(result.reward, 1) << result.message;
  };
  for (const char* completion : {"hang 1", "stop", "hang 2"}) {
    auto hanging = std::async(std::launch::async, [&] { return score(*reward, {completion})[0]; });
    wait_for_file(completion);
    expect_fine("a");  // scored by the other worker
    clock_.advance(std::chrono::milliseconds(999));
    expect_fine("b");
    EXPECT_EQ(hanging.wait_for(std::chrono::milliseconds(0)), std::future_status::timeout);
    clock_.advance(std::chrono::milliseconds(1));
    expect_failure(hanging.get(), "no result within 1 s (timeout_seconds); raise it");
    expect_fine("c");
  }
  EXPECT_EQ(reward->num_restarts(), 3);
}

TEST_F(ProcessReward, ADeadWorkerIsAFailureAndStartedAnew) {
  const auto reward = load(
      "import os, signal\n"
      "def score(completion, **_):\n"
      "    if completion == 'exit': os._exit(3)\n"
      "    if completion == 'crash': os.kill(os.getpid(), signal.SIGSEGV)\n"
      "    if completion == 'close': os.closerange(3, 100)\n"
      "    return 1\n");
  const auto results = score(*reward, {"exit", "a", "crash", "b", "c", "close", "d"});
  expect_failure(results[0], "the worker exited with status 3");
  expect_failure(results[2], "the worker was killed by signal 11 (Segmentation fault)");
  EXPECT_TRUE(results[5].failed);
  for (const size_t i : {1, 3, 4, 6}) EXPECT_EQ(results[i].reward, 1) << results[i].message;
  EXPECT_EQ(reward->num_restarts(), 3);
}

TEST_F(ProcessReward, AWorkerThatBreaksTheProtocolIsReplaced) {
  const auto reward = load(
      "import __main__\n"
      "def score(completion, **_):\n"
      "    if completion == 'endless':\n"
      "        while True: __main__.replies.write(b'x' * 65536)\n"
      "    if completion == 'other': __main__.reply(id=-1, reward=9)\n"
      "    if completion == 'noise': __main__.replies.write(b'noise\\n')\n"
      "    return 1\n");
  const auto results = score(*reward, {"endless", "other", "noise", "a"});
  expect_failure(results[0], "bytes without a line break");
  expect_failure(results[1], "the worker sent an unexpected reply");
  expect_failure(results[2], "it answered 'noise', which is not a valid reply");
  EXPECT_EQ(results[3].reward, 1);
  EXPECT_EQ(reward->num_restarts(), 3);
}

TEST_F(ProcessReward, AWorkerThatDiesIdleCostsNothing) {
  settings_.workers = 1;
  const auto reward = load("import os\ndef score(completion, **_): return os.getpid()\n");
  const auto pid = static_cast<pid_t>(score(*reward, {"a"})[0].reward);
  kill(pid, SIGKILL);
  while (reward->num_restarts() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const RewardResult after = score(*reward, {"b"})[0];
  EXPECT_FALSE(after.failed) << after.message;
  EXPECT_NE(after.reward, pid);
}

TEST_F(ProcessReward, UnloadableFilesAreUserErrorsAtTheStart) {
  const auto expect = [&](const std::string& code, const std::string& part) {
    const std::string got = error_of(code);
    EXPECT_NE(got.find(part), std::string::npos) << "got: " << got << "\nexpected: " << part;
    EXPECT_NE(got.find("my_reward.py:score"), std::string::npos) << got;
  };
  expect("def score(:\n", "SyntaxError: ");
  expect("def score(:\n", "line 1");
  expect("x = 1\nimport no_such_module_here\n",
         "ModuleNotFoundError: No module named 'no_such_module_here' (my_reward.py, line 2)");
  expect("def scored(): pass\nscore = 3\n", "LookupError: no function 'score' in it; it has: scored");
  expect("import sys\nsys.exit('not today')\n", "SystemExit: not today");
  expect("import os\nos._exit(5)\n", "the worker exited with status 5 before its first call");
  settings_.startup_timeout_seconds = 1;
  expect("import time\ntime.sleep(1000)\n", "not loaded within 1 s (reward_service.startup_timeout_seconds)");
}

TEST_F(ProcessReward, WrongSpecificationsAreNamed) {
  write("def score(): pass\n");
  const auto error = [&](const std::string& specification) -> std::string {
    try {
      const auto reward = make_python_reward(specification, settings_);
    } catch (const UserError& e) {
      return e.what();
    }
    return "no error";
  };
  const std::string file = (folder_ / "my_reward.py").string();
  for (const std::string& wrong :
       {std::string("my_reward.py"), file, file + ":", std::string(":score"), file + ":1a", file + ":a b"}) {
    EXPECT_NE(error(wrong).find("expected FILE.py:FUNCTION"), std::string::npos)
        << wrong << ": " << error(wrong);
  }
  EXPECT_NE(error(folder_.string() + ":score").find("is a directory"), std::string::npos);
  EXPECT_NE(error("nowhere.py:score").find("no file"), std::string::npos);
  settings_.python = "/nowhere/python3";
  EXPECT_NE(error(file + ":score").find("python: got '/nowhere/python3'"), std::string::npos);
  settings_.python = "/bin/false";
  EXPECT_NE(error(file + ":score").find("exited with status 1"), std::string::npos) << error(file + ":score");
}

TEST_F(ProcessReward, AFileBrokenUnderTheRunFailsCallsAndRecovers) {
  const std::string good =
      "import os\ndef score(completion, **_):\n    if completion == 'exit': os._exit(1)\n    return 1\n";
  const auto reward = load(good);
  write("raise RuntimeError('broken')\n");
  const auto broken = score(*reward, {"exit", "exit", "a", "b"});
  for (const size_t i : {0, 1}) expect_failure(broken[i], "the worker exited with status 1");
  for (const size_t i : {2, 3})
    expect_failure(broken[i], "the worker could not be started again: RuntimeError: broken");
  write(good);
  EXPECT_EQ(score(*reward, {"a"})[0].reward, 1);
}

TEST_F(ProcessReward, LargeAndBrokenTextsPass) {
  const auto reward = load("def score(completion, **_): return len(completion)\n");
  const std::string large(5'000'000, 'x');
  const auto results = score(*reward, {large, "ab\xFF\xFE", large, std::string("a\0b", 3), "line\nline\r\n"});
  EXPECT_EQ(results[0].reward, 5e6) << results[0].message;
  EXPECT_EQ(results[1].reward, 4) << results[1].message;
  EXPECT_EQ(results[2].reward, 5e6);
  EXPECT_EQ(results[3].reward, 3);
  EXPECT_EQ(results[4].reward, 11);
}

TEST_F(ProcessReward, SeveralThreadsMayCall) {
  const auto reward = load("def score(completion, **_): return int(completion)\n");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 5; ++round) {
        std::vector<std::string> completions;
        for (int i = 0; i < 20; ++i) completions.push_back(std::to_string(1000 * t + i));
        const auto results = score(*reward, completions);
        for (int i = 0; i < 20; ++i) EXPECT_EQ(results[i].reward, 1000 * t + i);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(ProcessReward, SiblingModulesAndAwkwardNamesWork) {
  write("VALUE = 6\n", "helper_of_reward.py");
  write(
      "import helper_of_reward, dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\n"
      "def score(**_): return A(helper_of_reward.VALUE).x\n",
      "json.py");
  const auto reward = make_python_reward((folder_ / "json.py").string() + ":score", settings_);
  const auto results = score(*reward, {"a"});
  EXPECT_EQ(results[0].reward, 6) << results[0].message;
}

TEST_F(ProcessReward, LeavesNoProcessBehind) {
  std::vector<pid_t> pids;
  {
    settings_.timeout_seconds = 1;
    const auto reward = load(
        "import os, subprocess, time\n"
        "def score(completion, **_):\n"
        "    if completion == 'hang': time.sleep(1000)\n"
        "    return subprocess.Popen(['sleep', '1000']).pid if completion == 'child' else os.getpid()\n");
    for (const auto& result : score(*reward, {"pid", "child", "hang", "pid"}))
      if (!result.failed) pids.push_back(static_cast<pid_t>(result.reward));
    EXPECT_EQ(pids.size(), 3u);
  }
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
  EXPECT_EQ(errno, ECHILD);
  for (const pid_t pid : pids) expect_gone(pid);
}

TEST_F(ProcessReward, AProcessThatLeftItsGroupDiesWithItsWorker) {
  settings_.timeout_seconds = 3;
  const auto reward = load(
      "import os, signal, subprocess, time\n"
      "def spawn(*, leave):\n"
      "    shell = 'trap \"\" TERM HUP; sleep 1000 & echo $!; wait'\n"
      "    child = subprocess.Popen(['sh', '-c', shell], stdout=subprocess.PIPE, start_new_session=leave)\n"
      "    return int(child.stdout.readline())\n"  // a grandchild
      "pids = []\n"
      "def score(completion, **_):\n"
      "    if completion == 'stay': return spawn(leave=False)\n"
      "    if completion == 'leave': return spawn(leave=True)\n"
      "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
      "    while True: time.sleep(1)\n");
  std::vector<pid_t> pids;
  for (const auto& result : score(*reward, {"stay", "leave", "stay", "leave"})) {
    ASSERT_FALSE(result.failed) << result.message;
    pids.push_back(static_cast<pid_t>(result.reward));
    EXPECT_TRUE(is_running(pids.back()));
  }
  for (const auto& result : score(*reward, {"hang", "hang"})) expect_failure(result, "no result within 3 s");
  for (const pid_t pid : pids) expect_gone(pid);
}

// Kills the process that uses the rewards with SIGKILL, so that it cannot clean up.
TEST_F(ProcessReward, NothingOutlivesAKillOfBough) {
  for (const bool is_command : {false, true}) {
    std::filesystem::remove(folder_ / "pids");
    const std::string file = (folder_ / "pids").string();
    const std::string spawn =
        "import os, subprocess, sys, time\n"
        "def score(completion, **_):\n"
        "    pids = [os.getpid()]\n"
        "    for leave in (False, True):\n"
        "        child = subprocess.Popen(['sh', '-c', 'sleep 1000 & echo $!; wait'],\n"
        "                                 stdout=subprocess.PIPE, start_new_session=leave)\n"
        "        pids += [child.pid, int(child.stdout.readline())]\n"
        "    with open('" +
        file +
        ".part', 'w') as f: f.write(' '.join(map(str, pids)))\n"
        "    os.rename('" +
        file + ".part', '" + file +
        "')\n"
        "    while True: time.sleep(1)\n"
        "if __name__ == '__main__': score(sys.stdin.readline())\n";
    const std::string specification = write(spawn);
    settings_.workers = 1;
    const pid_t bough = fork();
    if (bough == 0) {
      const auto reward =
          is_command ? make_command_reward("python3 " + (folder_ / "my_reward.py").string() + "; true", false,
                                           settings_)
                     : make_python_reward(specification, settings_);
      score(*reward, {"a"});
      _exit(0);
    }
    while (!std::filesystem::exists(file)) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::vector<pid_t> pids;
    {
      std::ifstream stream(file);
      for (pid_t pid; stream >> pid;) pids.push_back(pid);
    }
    ASSERT_EQ(pids.size(), 5u);
    for (const pid_t pid : pids) EXPECT_TRUE(is_running(pid)) << pid;
    kill(bough, SIGKILL);
    waitpid(bough, nullptr, 0);
    for (const pid_t pid : pids) expect_gone(pid);
  }
}

// ---- Retries ----

TEST_F(ProcessReward, ADeadWorkersCallIsTriedAgain) {
  settings_.retries = 2;
  const auto reward = load(
      "import os\n"
      "def score(completion, **_):\n"
      "    path = '" +
      folder_.string() +
      "/' + completion\n"
      "    attempts = open(path).read() if os.path.exists(path) else ''\n"
      "    open(path, 'w').write(attempts + 'x')\n"
      "    if len(attempts) < int(completion[1]): os._exit(3)\n"
      "    return len(attempts) + 1\n");
  const auto results = score(*reward, {"a0", "b1", "c2", "d3", "e0"});
  EXPECT_EQ(results[0].reward, 1) << results[0].message;
  EXPECT_EQ(results[1].reward, 2) << results[1].message;
  EXPECT_EQ(results[2].reward, 3) << results[2].message;
  expect_failure(results[3], "the worker exited with status 3 (attempt 3)");
  EXPECT_EQ(results[4].reward, 1) << results[4].message;
  EXPECT_EQ(reward->num_retries(), 1 + 2 + 2);
  EXPECT_EQ(reward->num_restarts(), 1 + 2 + 3);
}

TEST_F(ProcessReward, ErrorsAreAnswersAndNotTriedAgain) {
  settings_.retries = 5;
  const auto reward = load("def score(completion, **_): raise ValueError(completion)\n");
  expect_failure(score(*reward, {"no"})[0], "ValueError: no");
  EXPECT_EQ(reward->num_retries(), 0);
}

TEST_F(ProcessReward, TimeoutsAreRetriedOnlyIfASettingSaysSo) {
  settings_.timeout_seconds = 0.5;
  settings_.retries = 1;
  const std::string code = "import time\ndef score(completion, **_): time.sleep(1000)\n";
  const auto once = load(code);
  expect_failure(score(*once, {"a"})[0], "no result within 0.5 s");
  EXPECT_EQ(once->num_retries(), 0);
  settings_.retry_timeouts = true;
  const auto twice = load(code);
  expect_failure(score(*twice, {"a"})[0], "(attempt 2)");
  EXPECT_EQ(twice->num_retries(), 1);
}

// ---- Commands ----

TEST_F(ProcessReward, ACommandAnswersLinesAndStays) {
  settings_.workers = 1;
  const auto reward = command(
      "for line in sys.stdin:\n"
      "    request = json.loads(line)\n"
      "    assert request['prompt'] == 'the prompt' and request['answer'] == '#### 4', request\n"
      "    assert request['fields'] == {'level': 3, 'tags': ['a', 'b']}, request\n"
      "    answer(request['id'], os.getpid() if request['completion'] == 'pid' else "
      "len(request['completion']))\n");
  const auto results = score(*reward, {"abc", "pid", "line\nline", "pid"});
  EXPECT_EQ(results[0].reward, 3) << results[0].message;
  EXPECT_EQ(results[2].reward, 9);
  EXPECT_EQ(results[1].reward, results[3].reward) << "the same process";
}

TEST_F(ProcessReward, ACommandMayUseShellSyntax) {
  const std::string shell =
      "while read -r line; do id=${line##*'\"id\":'}; echo \"{\\\"id\\\": ${id%%,*}, \\\"reward\\\": "
      "$TWO}\"; done";
  const auto reward = make_command_reward("TWO=2; " + shell, false, settings_);
  for (const auto& result : score(*reward, {"a", "b", "c"})) EXPECT_EQ(result.reward, 2) << result.message;
}

TEST_F(ProcessReward, ACommandThatCannotRunEndsTheRunAtItsStart) {
  const auto error = [&](const auto& make) -> std::string {
    try {
      make();
    } catch (const UserError& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(error([&] { make_command_reward("/nowhere/judge --strict", false, settings_); }),
            "reward /nowhere/judge --strict: the worker exited with status 127 before its first call");
  settings_.startup_timeout_seconds = 0.5;
  EXPECT_NE(error([&] { command("time.sleep(1000)\n", true); }).find("not loaded within 0.5 s"),
            std::string::npos);
  settings_.startup_timeout_seconds = 60;
  EXPECT_NE(error([&] {
              command("write('{\"ready\": false, \"error\": \"no weights\"}\\n'); time.sleep(9)\n", true);
            }).find("no weights"),
            std::string::npos);
  EXPECT_NE(error([&] { command("write('hello\\n'); time.sleep(9)\n", true); }).find("it answered 'hello'"),
            std::string::npos);
  const auto ready = command(
      "time.sleep(0.3)\nwrite('{\"ready\": true}\\n')\n"
      "for line in sys.stdin: answer(json.loads(line)['id'], 1)\n",
      true);
  EXPECT_EQ(score(*ready, {"a"})[0].reward, 1);
}

// Each kind of faulty or missing answer fails only the sample of its call. The next calls still find a
// worker.
TEST_F(ProcessReward, AnErrorOfTheCommandFailsOnlyItsSample) {
  settings_.timeout_seconds = 3;
  const auto reward = command(
      "write('{\"ready\": true}\\n')\n"
      "for line in sys.stdin:\n"
      "    request = json.loads(line)\n"
      "    id, how = request['id'], request['completion']\n"
      "    if how == 'fine': answer(id, 0.5)\n"
      "    elif how == 'error': write(json.dumps({'id': id, 'error': 'x' * 10**5}) + '\\n')\n"
      "    elif how == 'nan': answer(id, float('nan'))\n"
      "    elif how == 'infinite': write('{\"id\": %d, \"reward\": 1e999}\\n' % id)\n"
      "    elif how == 'text': answer(id, '1')\n"
      "    elif how == 'null': answer(id, None)\n"
      "    elif how == 'other id': answer(id + 1, 1)\n"
      "    elif how == 'twice': answer(id, 1); answer(id, 2)\n"
      "    elif how == 'garbage': sys.stdout.buffer.write(os.urandom(1000) + b'\\n'); sys.stdout.flush()\n"
      "    elif how == 'flood': write('x' * 100_000_000)\n"
      "    elif how == 'flood of lines': write('debug: x\\n' * 10_000_000)\n"
      "    elif how == 'close': os.close(0); os.close(1); time.sleep(1000)\n"
      "    elif how == 'close stdout': os.close(1); time.sleep(1000)\n"
      "    elif how == 'half': write('{\"id\": '); os._exit(0)\n"
      "    elif how == 'hang':\n"
      "        import signal\n"
      "        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(each, "
      "signal.SIG_IGN)\n"
      "        time.sleep(1000)\n",
      /*ready_line=*/true);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"error", "judge.py': xxx"},
      {"nan", "which is not a valid reply"},
      {"infinite", "which is not a valid reply"},
      {"text", "it answered the reward '\"1\"', expected a finite number"},
      {"null", "it answered the reward 'null'"},
      {"other id", "the worker sent an unexpected reply (id "},
      {"garbage", "which is not a valid reply"},
      {"flood", "the worker's answer has more than 1048576 bytes without a line break"},
      {"flood of lines", "it answered 'debug: x', which is not a valid reply"},
      {"close", "the worker closed its connection"},
      {"close stdout", "no result within 3 s"},
      {"half", "the worker exited with status 0"},
      {"hang", "no result within 3 s"}};
  std::vector<std::string> completions;
  for (const auto& [how, message] : cases) completions.insert(completions.end(), {how, "fine", "fine"});
  const auto results = score(*reward, completions);
  for (size_t i = 0; i < cases.size(); ++i) {
    expect_failure(results[3 * i], cases[i].second);
    EXPECT_LT(results[3 * i].message.size(), 1500u);
    for (const size_t k : {1, 2}) EXPECT_EQ(results[3 * i + k].reward, 0.5) << results[3 * i + k].message;
  }
  // A second answer belongs to no call. The first one counts.
  const auto twice = score(*reward, {"twice", "fine", "fine", "fine"});
  EXPECT_EQ(twice[0].reward, 1) << twice[0].message;
}

// The clock does not advance, so that no time limit ends a call.
TEST_F(ProcessReward, CancelEndsWaitingCalls) {
  const auto reward = load("import time\ndef score(completion, **_):\n    open('" + folder_.string() +
                               "/begun', 'w').close()\n    time.sleep(1000)\n",
                           fake_time());
  std::vector<std::thread> callers;
  for (int t = 0; t < 3; ++t)
    callers.emplace_back([&] {
      for (const RewardResult& result : score(*reward, {"a", "b", "c"})) expect_failure(result, "cancelled");
    });
  wait_for_file("begun");
  reward->cancel();
  for (std::thread& caller : callers) caller.join();
  expect_failure(score(*reward, {"d"})[0], "cancelled");
}

TEST_F(ProcessReward, CallersOfSeveralThreadsAreServedSideBySide) {
  settings_.workers = 4;
  // Each call waits until all four have begun. Calls one after the other would wait for ever.
  const auto reward = load(
      "import os, time\n"
      "def score(completion, **_):\n"
      "    open('" +
      folder_.string() +
      "/begun' + completion, 'w').close()\n"
      "    while not all(os.path.exists(f'" +
      folder_.string() +
      "/begun{i}') for i in range(4)): time.sleep(0.01)\n"
      "    return int(completion)\n");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] { EXPECT_EQ(score(*reward, {std::to_string(t)})[0].reward, t); });
  for (std::thread& thread : threads) thread.join();
}

TEST_F(ProcessReward, FindsTheInterpreterOfTheInstallation) {
  unsetenv("BOUGH_PYTHON");
  const auto fake = folder_ / ".venv/bin/python3";
  std::filesystem::create_directories(fake.parent_path());
  std::ofstream(fake) << "#!/bin/sh\n";
  EXPECT_NE(find_python("", (folder_ / "build/bin/bough").string()), fake.string());  // not executable
  std::filesystem::permissions(fake, std::filesystem::perms::owner_all);
  EXPECT_EQ(find_python("", (folder_ / "build/bin/bough").string()), fake.string());
  setenv("BOUGH_PYTHON", "sh", 1);
  EXPECT_TRUE(find_python("", (folder_ / "build/bin/bough").string()).ends_with("/sh"));
  EXPECT_EQ(find_python(fake.string(), "/x"), fake.string());
  setenv("BOUGH_PYTHON", "/nowhere", 1);
  EXPECT_THROW(find_python("", "/x"), UserError);
  unsetenv("BOUGH_PYTHON");
}

}  // namespace
}  // namespace bough

#include "env/python_reward.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <fstream>
#include <thread>

#include "base/error.h"

namespace bough {
namespace {

using std::chrono::steady_clock;

class PythonRewardFile : public testing::Test {
 protected:
  PythonRewardFile()
      : folder_(std::filesystem::path(testing::TempDir()) / str("bough_python_reward_", getpid())) {
    std::filesystem::create_directories(folder_);
    settings_.workers = 2;
    settings_.timeout_seconds = 30;  // a machine under load must not turn slow calls into failed ones
  }
  ~PythonRewardFile() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& code, const std::string& name = "my_reward.py") {
    std::ofstream(folder_ / name) << code;
    return (folder_ / name).string() + ":score";
  }
  std::unique_ptr<PythonReward> load(const std::string& code) {
    return std::make_unique<PythonReward>(write(code), settings_);
  }
  // Each completion is scored by a call of its own.
  std::vector<RewardResult> score(PythonReward& reward, const std::vector<std::string>& completions) {
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
  RewardSettings settings_;
  Problem problem_{"1", "", {}, "#### 4", {{"answer", "#### 4"}, {"level", 3}, {"tags", {"a", "b"}}}};
};

TEST_F(PythonRewardFile, GetsPromptCompletionAndFields) {
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

TEST_F(PythonRewardFile, AFunctionGetsOnlyWhatItNames) {
  const auto reward = load("def score(completion, level):\n    return level if completion == 'c' else 0\n");
  EXPECT_EQ(score(*reward, {"c"})[0].reward, 3);
}

TEST_F(PythonRewardFile, ResultsKeepTheOrderAndWorkersRunTogether) {
  settings_.workers = 4;
  // Later calls end first, and every worker is used: the first four calls wait for each other.
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

TEST_F(PythonRewardFile, WhatItPrintsOrReadsDoesNotDisturbTheProtocol) {
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

TEST_F(PythonRewardFile, ExceptionsAreFailuresWithMessageAndLine) {
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

TEST_F(PythonRewardFile, OnlyFiniteNumbersAreRewards) {
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

TEST_F(PythonRewardFile, AHangIsCutOffAndItsWorkerStartedAnew) {
  settings_.timeout_seconds = 1;
  const auto reward = load(
      "import os, signal\n"
      "def score(completion, **_):\n"
      "    while completion == 'hang': pass\n"
      "    if completion == 'stop': os.kill(os.getpid(), signal.SIGSTOP)\n"
      "    return 1\n");
  const auto begin = steady_clock::now();
  const auto results = score(*reward, {"hang", "a", "stop", "b", "hang", "c"});
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(60));
  for (const size_t i : {0, 2, 4}) expect_failure(results[i], "no result within 1 s (timeout_seconds)");
  for (const size_t i : {1, 3, 5}) EXPECT_EQ(results[i].reward, 1) << results[i].message;
  EXPECT_EQ(reward->num_restarts(), 3);
}

TEST_F(PythonRewardFile, ADeadWorkerIsAFailureAndStartedAnew) {
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

TEST_F(PythonRewardFile, AWorkerThatBreaksTheProtocolIsReplaced) {
  const auto reward = load(
      "import __main__\n"
      "def score(completion, **_):\n"
      "    if completion == 'endless':\n"
      "        while True: __main__.replies.write(b'x' * 65536)\n"
      "    if completion == 'other': __main__.reply(id=-1, reward=9)\n"
      "    if completion == 'noise': __main__.replies.write(b'noise\\n')\n"
      "    return 1\n");
  const auto results = score(*reward, {"endless", "other", "noise", "a"});
  expect_failure(results[0], "the worker's answer has no end");
  expect_failure(results[1], "the worker answered what it was not asked");
  expect_failure(results[2], "the worker answered 'noise', which is not a reply");
  EXPECT_EQ(results[3].reward, 1);
  EXPECT_EQ(reward->num_restarts(), 3);
}

TEST_F(PythonRewardFile, AWorkerThatDiesIdleCostsNothing) {
  settings_.workers = 1;
  const auto reward = load("import os\ndef score(completion, **_): return os.getpid()\n");
  const auto pid = static_cast<pid_t>(score(*reward, {"a"})[0].reward);
  kill(pid, SIGKILL);
  while (reward->num_restarts() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const RewardResult after = score(*reward, {"b"})[0];
  EXPECT_FALSE(after.failed) << after.message;
  EXPECT_NE(after.reward, pid);
}

TEST_F(PythonRewardFile, WhatCannotBeLoadedIsTheUsersErrorAtTheStart) {
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
  expect("import os\nos._exit(5)\n", "the worker exited with status 5 while loading the file");
  settings_.startup_timeout_seconds = 1;
  expect("import time\ntime.sleep(1000)\n", "not loaded within 1 s (startup_timeout_seconds)");
}

TEST_F(PythonRewardFile, WrongSpecificationsAreNamed) {
  write("def score(): pass\n");
  const auto error = [&](const std::string& specification) -> std::string {
    try {
      PythonReward reward(specification, settings_);
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

TEST_F(PythonRewardFile, AFileBrokenUnderTheRunFailsCallsAndRecovers) {
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

TEST_F(PythonRewardFile, LargeAndBrokenTextsPass) {
  const auto reward = load("def score(completion, **_): return len(completion)\n");
  const std::string large(5'000'000, 'x');
  const auto results = score(*reward, {large, "ab\xFF\xFE", large, std::string("a\0b", 3), "line\nline\r\n"});
  EXPECT_EQ(results[0].reward, 5e6) << results[0].message;
  EXPECT_EQ(results[1].reward, 4) << results[1].message;
  EXPECT_EQ(results[2].reward, 5e6);
  EXPECT_EQ(results[3].reward, 3);
  EXPECT_EQ(results[4].reward, 11);
}

TEST_F(PythonRewardFile, SeveralThreadsMayCall) {
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

TEST_F(PythonRewardFile, SiblingModulesAndAwkwardNamesWork) {
  write("VALUE = 6\n", "helper_of_reward.py");
  write(
      "import helper_of_reward, dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\n"
      "def score(**_): return A(helper_of_reward.VALUE).x\n",
      "json.py");
  PythonReward reward((folder_ / "json.py").string() + ":score", settings_);
  const auto results = score(reward, {"a"});
  EXPECT_EQ(results[0].reward, 6) << results[0].message;
}

bool is_alive(pid_t pid) {
  return kill(pid, 0) == 0;
}

TEST_F(PythonRewardFile, LeavesNoProcessBehind) {
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
  for (const pid_t pid : pids) {
    for (int i = 0; i < 500 && is_alive(pid); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    // A process that was not our child may stay a zombie where nobody reaps orphans; it runs no more.
    std::string state;
    if (std::ifstream stat(str("/proc/", pid, "/stat")); stat) std::getline(stat, state);
    EXPECT_TRUE(state.empty() || state.find(") Z ") != std::string::npos) << state;
  }
}

TEST_F(PythonRewardFile, WorkersDieWithTheirParent) {
  const std::string specification = write(
      "import os, time\n"
      "def score(completion, **_):\n"
      "    with open('" +
      folder_.string() +
      "/pid.part', 'w') as f: f.write(str(os.getpid()))\n"
      "    os.rename('" +
      folder_.string() + "/pid.part', '" + folder_.string() +
      "/pid')\n"
      "    while True: pass\n");
  settings_.workers = 1;
  const pid_t child = fork();
  if (child == 0) {
    PythonReward reward(specification, settings_);
    score(reward, {"a"});
    _exit(0);
  }
  pid_t worker = 0;
  while (!(std::ifstream(folder_ / "pid") >> worker))
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(is_alive(worker));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  std::string state = "alive";
  for (int i = 0; i < 500 && !state.empty() && state.find(") Z ") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    state.clear();
    if (std::ifstream stat(str("/proc/", worker, "/stat")); stat) std::getline(stat, state);
  }
  EXPECT_TRUE(state.empty() || state.find(") Z ") != std::string::npos) << state;
}

TEST_F(PythonRewardFile, FindsTheInterpreterOfTheInstallation) {
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

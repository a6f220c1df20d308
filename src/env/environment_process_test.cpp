#include "env/environment_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <set>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "env/env_test_util.h"

namespace bough {
namespace {

// Counts down from the problem's answer, one per call of step(). A word in the model's turn chooses how
// step() fails.
constexpr const char* kCountdown = R"PY(
import os, signal, socket, subprocess, sys, time

class Countdown:
    def reset(self, problem, seed):
        self.left = int(problem["answer"])
        if problem.get("die") and not os.path.exists(problem["die"]):
            open(problem["die"], "w").close()
            os._exit(3)
        tools = [{"type": "function", "function": {"name": "b", "a": 1}}]
        return {"messages": f"from {self.left}, seed {seed}", "tools": tools}

    def step(self, action):
        word = action["content"]
        if word.startswith("spawn "):  # in its session, out of it, and out of it with nothing inherited
            seconds, word = word.split()[1:]
            shell = f"trap '' TERM HUP INT; sleep {seconds} & wait"
            for options in ({}, {"start_new_session": True}, {"start_new_session": True, "env": {}}):
                subprocess.Popen(["/bin/sh", "-c", shell], stdin=subprocess.DEVNULL, **options)
            if os.fork() == 0:  # a daemon that closes everything
                os.setsid()
                os.closerange(0, 1000)
                os.execve("/bin/sleep", ["sleep", seconds], {})
            time.sleep(0.2)
        if word == "raise":
            raise ValueError("no such thing")
        if word == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1)
        if word == "die":
            os._exit(7)
        if word == "garbage":
            os.write(replies.fileno(), b"what?\n")
            time.sleep(100)
        if word == "huge":
            replies.write(b"x" * 100_000_000)
        if word == "close":
            socket.socket(fileno=os.dup(replies.fileno())).shutdown(socket.SHUT_RDWR)
            time.sleep(100)
        if word == "nan":
            return {"messages": "", "reward": float("nan")}
        if word == "odd":
            return {"messages": "", "rewrad": 1}
        if word == "print":
            print("noise on stdout")
        self.left -= 1
        answers = [{"role": "tool", "content": str(self.left)} for _ in action["calls"]]
        return {"messages": answers or str(self.left), "reward": 0.25, "rewards": {"style": 2},
                "done": self.left == 0}

# What a method of the class writes to the protocol's own descriptor is what a broken worker would.
replies = sys.modules["__main__"].replies
)PY";

class ProcessEnvironmentTest : public EpisodeTest {
 protected:
  ProcessEnvironmentTest() {
    settings_.type = "python";
    settings_.path = write("env.py", kCountdown) + ":Countdown";
  }
  // A text in the arguments of all processes that the test starts, by which processes_with() finds them.
  std::string mark() const { return str("9", getpid(), ".0625"); }
};

TEST_F(ProcessEnvironmentTest, HoldsConversationsSideBySide) {
  const auto environment = make_environment(settings_);
  const uint64_t first = begin(*environment, problem(2)), second = begin(*environment, problem(9));
  std::map<uint64_t, EpisodeReply> opened;
  for (int i = 0; i < 2; ++i) {
    EpisodeReply reply = wait();
    opened[reply.episode] = std::move(reply);
  }
  EXPECT_EQ(opened[first].observation.messages.dump(), R"([{"role":"user","content":"from 2, seed 5"}])");
  EXPECT_EQ(opened[second].observation.messages[0]["content"], "from 9, seed 5");
  EXPECT_EQ(opened[first].observation.tools[0]["function"].dump(), R"({"name":"b","a":1})")
      << "keys keep their order";
  environment->step(first, {.text = "x", .content = "x", .calls = {{"c1", "b", {}}, {"c2", "b", {}}}});
  EpisodeReply reply = wait();
  EXPECT_EQ(reply.episode, first);
  EXPECT_EQ(reply.observation.messages.dump(),
            R"([{"role":"tool","content":"1"},{"role":"tool","content":"1"}])");
  EXPECT_EQ(reply.observation.reward, 0.25);
  EXPECT_EQ(reply.observation.rewards.at("style"), 2);
  EXPECT_FALSE(reply.observation.done);
  environment->step(first, {.text = "print", .content = "print"});
  EXPECT_TRUE(wait().observation.done);
  environment->step(second, {.text = "x", .content = "x"});
  EXPECT_EQ(wait().observation.messages[0]["content"], "8");
}

TEST_F(ProcessEnvironmentTest, ProcessesAreUsedAgain) {
  settings_.workers = 1;
  const auto environment = make_environment(settings_);
  EXPECT_EQ(environment->max_open(), 1);
  std::set<uint64_t> open;
  for (int i = 0; i < 7; ++i) open.insert(begin(*environment, problem(1)));
  while (!open.empty()) {
    const EpisodeReply reply = wait();
    ASSERT_EQ(reply.failure, EpisodeFailure::kNone) << reply.message;
    if (reply.observation.done) {
      environment->end(reply.episode);
      open.erase(reply.episode);
    } else {
      environment->step(reply.episode, {.text = "x", .content = "x"});
    }
  }
  for (int i = 0; i < 20; ++i) EXPECT_EQ(say(*environment, "x").failure, EpisodeFailure::kNone);
}

TEST_F(ProcessEnvironmentTest, AFailureEndsOnlyItsConversation) {
  settings_.timeout_seconds = 4;
  auto environment = make_environment(settings_);
  const uint64_t bystander = begin(*environment, problem(100));
  wait();
  using enum EpisodeFailure;
  const struct {
    const char* word;
    EpisodeFailure failure;
    const char* message;
  } kFaults[] = {{"raise", kError, "ValueError: no such thing (env.py, line 26)"},
                 {"hang", kTimeout, "no answer within 4 s"},
                 {"die", kCrash, "exited with status 7"},
                 {"garbage", kProtocol, "what?"},
                 {"huge", kProtocol, "without a line break"},
                 {"close", kCrash, "closed its connection"},
                 {"nan", kProtocol, "not a JSON object"},
                 {"odd", kError, "rewrad"}};
  for (const auto& [word, failure, message] : kFaults) {
    const EpisodeReply reply = say(*environment, str("spawn ", mark(), " ", word));
    EXPECT_STREQ(failure_name(reply.failure), failure_name(failure)) << word << ": " << reply.message;
    EXPECT_NE(reply.message.find(message), std::string::npos) << word << ": " << reply.message;
    environment->step(bystander, {.text = "x", .content = "x"});
    const EpisodeReply other = wait();
    EXPECT_EQ(other.episode, bystander);
    EXPECT_EQ(other.failure, kNone) << other.message;
  }
  // Processes whose code only raised an exception are still in use, and so are their child processes. All of
  // them end with the environment.
  EXPECT_FALSE(processes_with(mark()).empty());
  environment.reset();
  expect_none_with(mark());
  expect_none_with((folder_ / "env.py").string());
}

// Tests only faults after which the process is killed. After other faults, the process is used again and
// keeps its child processes.
TEST_F(ProcessEnvironmentTest, ProcessesOfABrokenEnvironmentAreKilled) {
  settings_.timeout_seconds = 4;
  const auto environment = make_environment(settings_);
  for (const char* word : {"hang", "die", "garbage", "huge", "close"}) {
    EXPECT_NE(say(*environment, str("spawn ", mark(), " ", word)).failure, EpisodeFailure::kNone);
    expect_none_with(mark());
  }
}

TEST_F(ProcessEnvironmentTest, NothingOutlivesAKillOfBough) {
  const std::string mark = this->mark();
  const pid_t bough = fork();
  if (bough == 0) {
    const auto environment = make_environment(settings_);
    say(*environment, str("spawn ", mark, " hang"));
    _exit(0);
  }
  for (int i = 0; i < 2000 && processes_with(mark).size() < 7; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_GE(processes_with(mark).size(), 7u) << "three shells, their sleeps, and the daemon";
  kill(bough, SIGKILL);
  waitpid(bough, nullptr, 0);
  expect_none_with(mark);
  expect_none_with((folder_ / "env.py").string());
}

TEST_F(ProcessEnvironmentTest, OpeningIsRetriedIfTheProcessDied) {
  const auto environment = make_environment(settings_);
  begin(*environment, problem(1, {{"die", (folder_ / "once").string()}}));
  const EpisodeReply reply = wait();
  EXPECT_EQ(reply.failure, EpisodeFailure::kNone) << reply.message;
  settings_.retries = 0;
  const auto strict = make_environment(settings_);
  begin(*strict, problem(1, {{"die", (folder_ / "twice").string()}}));
  EXPECT_EQ(wait().failure, EpisodeFailure::kCrash);
}

// The clock does not advance, so that no time limit ends the hanging call.
TEST_F(ProcessEnvironmentTest, AConversationThatIsLeftIsNotWaitedFor) {
  settings_.workers = 1;
  const FakeClock clock;
  auto environment = make_process_environment(settings_, {.clock = &clock});
  const uint64_t hanging = begin(*environment, problem(1));
  wait();
  environment->step(hanging, {.text = "hang", .content = "hang"});
  environment->end(hanging);
  EXPECT_EQ(say(*environment, "x").failure, EpisodeFailure::kNone);
  const uint64_t at_end = begin(*environment, problem(1));
  wait();
  environment->step(at_end, says("hang"));
  environment.reset();
  expect_none_with((folder_ / "env.py").string());
}

TEST_F(ProcessEnvironmentTest, ACommandAnswersLines) {
  settings_.type = "command";
  settings_.path = "";
  settings_.command = "exec python3 '" + write("game.py", R"PY(
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["method"] == "reset":
        print(json.dumps({"id": request["id"], "messages": request["problem"]["answer"]}), flush=True)
    if request["method"] == "step":
        print(json.dumps({"id": request["id"], "reward": 1, "done": True}), flush=True)
)PY") + "'";
  const auto environment = make_environment(settings_);
  const EpisodeReply reply = say(*environment, "x");
  EXPECT_TRUE(reply.observation.done);
  EXPECT_EQ(reply.observation.reward, 1);
  EXPECT_EQ(say(*environment, "again").observation.reward, 1) << "a process is used again";
}

TEST_F(ProcessEnvironmentTest, UnusableEnvironmentsAreUserErrorsAtTheStart) {
  settings_.path =
      write("other.py", "class Other:\n    def reset(self, problem, seed): pass\n") + ":Countdown";
  EXPECT_NE(error_of().find("no class 'Countdown' in it; it has: Other"), std::string::npos) << error_of();
  settings_.path = (folder_ / "other.py").string() + ":Other";
  EXPECT_NE(error_of().find("no method 'step'"), std::string::npos) << error_of();
  settings_.path = "missing.py:Countdown";
  EXPECT_NE(error_of().find("environment.path: no file"), std::string::npos) << error_of();
  settings_.path = "env.py";
  EXPECT_NE(error_of().find("expected FILE.py:CLASS"), std::string::npos) << error_of();
  settings_.type = "command";
  settings_.path = "";
  settings_.command = "/no/such/program";
  EXPECT_NE(error_of().find("exited with status 127"), std::string::npos) << error_of();
}

}  // namespace
}  // namespace bough

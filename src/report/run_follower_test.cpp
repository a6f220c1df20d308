#include "report/run_follower.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/base_test_util.h"
#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "report/progress_file.h"
#include "report/run_watch.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

class RunFollowerTest : public ::testing::Test {
 protected:
  void append(const std::string& name, const std::string& text) {
    std::ofstream(folder() / name, std::ios::app) << text;
  }
  fs::path folder() const { return folder_.path(); }
  static std::string kinds(const std::vector<Json>& events) {
    std::string out;
    for (const Json& event : events) out += (out.empty() ? "" : " ") + event["kind"].get<std::string>();
    return out;
  }
  TemporaryFolder folder_;
};

TEST_F(RunFollowerTest, GivesWhatIsThereAndThenWhatIsAdded) {
  append("metrics.jsonl", "{\"step\":1,\"reward/mean\":0.5,\"x\":null}\n{\"step\":2,\"reward/mean\":0.75}\n");
  append("timeline.jsonl", "[\"engine\",\"generate\",0.5,1.5]\n");
  RunFollower follower(folder());
  Json snapshot = follower.snapshot();
  EXPECT_EQ(dump_line(snapshot["curves"]), "{\"reward/mean\":{\"steps\":[1,2],\"values\":[0.5,0.75]}}");
  EXPECT_EQ(dump_line(snapshot["busy"]), "{\"engine\":{\"generate\":1.0}}");
  EXPECT_EQ(kinds(follower.poll()), "");

  append("metrics.jsonl",
         "{\"step\":3,\"reward/mean\":1}\n{\"step\":4,\"rew");  // the last line is incomplete
  append("timeline.jsonl", "[\"engine\",\"generate\",2,2.5]\n[\"damaged\"]\n");
  fs::create_directory(folder() / "rollouts");
  append("rollouts/step_12.jsonl.zst", "");
  append("rollouts/.step_13.jsonl.zst.tmp", "");
  const std::vector<Json> events = follower.poll();
  EXPECT_EQ(kinds(events), "metrics timeline steps");
  EXPECT_EQ(dump_line(events[0]["values"]), "{\"reward/mean\":1}");
  EXPECT_EQ(dump_line(events[1]["busy"]), "{\"engine\":{\"generate\":1.5}}");
  EXPECT_EQ(dump_line(events[2]["steps"]), "[12]");

  append("metrics.jsonl", "ard/mean\":2}\n");
  EXPECT_EQ(kinds(follower.poll()), "metrics");
  EXPECT_EQ(follower.last_step(), 4);
  EXPECT_EQ(follower.curves().at("reward/mean").values.back(), 2);
}

TEST_F(RunFollowerTest, AResumedRunThatCutsItsFilesIsReadAgain) {
  append("metrics.jsonl", "{\"step\":1,\"a\":1}\n{\"step\":2,\"a\":2}\n{\"step\":3,\"a\":3}\n");
  RunFollower follower(folder());
  write_file_atomically(folder() / "metrics.jsonl", "{\"step\":1,\"a\":1}\n");
  EXPECT_EQ(kinds(follower.poll()), "reload");
  EXPECT_EQ(dump_line(follower.snapshot()["curves"]), "{\"a\":{\"steps\":[1],\"values\":[1.0]}}");
  append("metrics.jsonl", "{\"step\":2,\"a\":5}\n");
  EXPECT_EQ(kinds(follower.poll()), "metrics");
  EXPECT_EQ(dump_line(follower.snapshot()["curves"]), "{\"a\":{\"steps\":[1,2],\"values\":[1.0,5.0]}}");
}

TEST_F(RunFollowerTest, ProblemsOfOneKindAreCounted) {
  const std::string at = "2026-11-27 10:06:34.320 ";
  append("log.txt", at + "info: fine\n" + at + "warning: worker 3 timed out\nafter a while\n" + at +
                        "debug: step 1\nnot part of it\n" + at + "warning: worker 14 timed out\n" + at +
                        "error: <b>full</b>\n");
  RunFollower follower(folder());
  Json problems = follower.snapshot()["problems"];
  ASSERT_EQ(problems.size(), 2u);
  EXPECT_EQ(problems[0]["text"], "worker 3 timed out\nafter a while");
  EXPECT_EQ(problems[0]["count"], 2);
  EXPECT_EQ(problems[1]["level"], "error");
  append("log.txt", at + "debug: step 2\n");
  EXPECT_EQ(kinds(follower.poll()), "");
  append("log.txt", at + "warning: worker 3 timed out\n");
  EXPECT_EQ(kinds(follower.poll()), "problems");
}

TEST_F(RunFollowerTest, ALongCurveIsThinnedAndKeepsItsEnd) {
  std::string text;
  const int64_t count = 10'001;
  for (int64_t step = 1; step <= count; ++step) text += str("{\"step\":", step, ",\"a\":", step, "}\n");
  append("metrics.jsonl", text);
  const Json curve = RunFollower(folder()).snapshot()["curves"]["a"];
  EXPECT_LE(curve["steps"].size(), RunFollower::kMostPoints + 1);
  EXPECT_GE(curve["steps"].size(), RunFollower::kMostPoints / 2);
  EXPECT_EQ(curve["steps"].back(), count);
  EXPECT_EQ(curve["values"].back(), count);
}

TEST_F(RunFollowerTest, GroupsOfTheStepInWorkAreNoticed) {
  for (const char* name : {"rollouts", "traces"}) std::filesystem::create_directory(folder() / name);
  append("rollouts/step_3.jsonl.zst", "");
  RunFollower follower(folder());
  EXPECT_TRUE(follower.snapshot()["open"].is_null());
  append("traces/waiting_7.jsonl.zst", "x");
  EXPECT_EQ(dump_line(follower.poll().at(0)["open"]), "{\"bytes\":0,\"step\":4,\"waiting\":1}");
  append("traces/dropped_4.jsonl.zst", "xy");
  EXPECT_EQ(follower.poll().at(0)["open"]["bytes"], 2);
  append("traces/dropped_3.jsonl.zst", "of the step before");
  EXPECT_TRUE(follower.poll().empty());
}

TEST_F(RunFollowerTest, ProgressSaysWhetherTheProcessIsAlive) {
  FakeClock clock;
  ProgressFile progress(folder() / "progress.json", 20, clock);
  RunFollower follower(folder());
  Json now = follower.snapshot()["progress"];
  EXPECT_EQ(now["state"], "running");
  EXPECT_EQ(now["is_alive"], true);
  EXPECT_EQ(now["total_steps"], 20);

  progress.set_activity("rollout 1/16");
  EXPECT_EQ(kinds(follower.poll()), "") << "at most one write a second";
  clock.advance(std::chrono::seconds(1));
  progress.set_activity("rollout 1/16");
  EXPECT_EQ(kinds(follower.poll()), "progress") << "an activity that lasts is written later";
  clock.advance(std::chrono::seconds(1));
  progress.set_activity("rollout 2/16");
  EXPECT_EQ(kinds(follower.poll()), "progress");
  now = follower.snapshot()["progress"];
  EXPECT_EQ(now["activity"], "rollout 2/16");
  const double since = now["since"];
  clock.advance(std::chrono::seconds(1));
  progress.set_activity("rollout 3/16");
  follower.poll();
  EXPECT_EQ(follower.snapshot()["progress"]["since"], since) << "the same activity with another number";

  progress.end("failed", "disk full");
  follower.poll();
  now = follower.snapshot()["progress"];
  EXPECT_EQ(now["state"], "failed");
  EXPECT_EQ(now["error"], "disk full");
  now["pid"] = 0x7ffffff0;  // beyond the largest process id
  write_file_atomically(folder() / "progress.json", dump_line(now));
  follower.poll();
  EXPECT_EQ(follower.snapshot()["progress"]["is_alive"], false);
}

TEST_F(RunFollowerTest, WatchFitsTheTerminalAndShowsNoControlCharacters) {
  for (int step = 1; step <= 100; ++step)
    append("metrics.jsonl", str("{\"step\":", step, ",\"reward/mean\":", step, ",\"time/step\":2}\n"));
  append("log.txt", "2026-11-27 10:06:34.320 warning: \x1b[2Jgone " + std::string(300, 'x') + "\n");
  FakeClock clock;
  ProgressFile progress(folder() / "progress.json", 130, clock);
  clock.advance(std::chrono::seconds(1));
  progress.set_threads({{"engine", "generate"}, {"trainer", ""}});
  clock.advance(std::chrono::seconds(1));
  progress.set_queue({{"running", 3}, {"awaiting", 1}, {"buffered", 2}});
  RunFollower follower(folder());
  const std::string text = watch_text(follower, 60);
  EXPECT_NE(text.find("engine: generate "), std::string::npos) << text;
  EXPECT_NE(text.find(", trainer: waits "), std::string::npos) << text;
  EXPECT_NE(text.find("groups: 3 in generation, 1 waiting for rewards, 2 scored\n"), std::string::npos)
      << text;
  EXPECT_NE(text.find("step 100 of 130, 1:00 left"), std::string::npos) << text;
  EXPECT_NE(text.find("reward                 100  ▁"), std::string::npos) << text;
  EXPECT_NE(text.find("warning (1):  [2Jgone xxx"), std::string::npos) << text;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
    EXPECT_LE(display_width(text.substr(begin, end - begin)), 60);
  EXPECT_FALSE(has_ended(follower));
  progress.end("finished");
  follower.poll();
  EXPECT_TRUE(has_ended(follower));
}

}  // namespace
}  // namespace bough

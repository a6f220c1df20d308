#include "report/display.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "base/format.h"

namespace bough {
namespace {

const MetricValues kStep = {{"reward/mean", 0.41234},  {"rollout/length_mean", 87.25},
                            {"tree/compression", 3.1}, {"perf/generated_tokens_per_s", 12345},
                            {"time/step", 3.2},        {"eval/avg_at_k", 0.5}};

TEST(LiveDisplay, ALineShowsTheMetricsOfAStep) {
  FakeClock clock;
  LiveDisplay display(100, clock, DisplayStyle::kSilent);
  display.write(12, kStep);
  EXPECT_EQ(display.line(12, kStep),
            "step 12/100  reward 0.412  accuracy 0.500  length 87.2  compression 3.10x  tokens/s 12.3k  time "
            "3.2 s  left 4:42");
  EXPECT_EQ(display.line(12, {{"eval/avg_at_k", 0.5}, {"eval_sparse/avg_at_k", 0.25}}),
            "step 12/100  accuracy 0.500  left 4:42  accuracy with sparse attention 0.250");
  // The accuracy is that of the last evaluation. A metric that is NaN is not shown.
  EXPECT_EQ(display.line(13, {{"reward/mean", NAN}}), "step 13/100  accuracy 0.500  left 4:38");
}

TEST(LiveDisplay, PipedItPrintsTheActivityAfterALongSilence) {
  FakeClock clock;
  LiveDisplay display(100, clock, DisplayStyle::kLines);
  const auto seconds = [](double count) {
    return std::chrono::duration_cast<Clock::Duration>(std::chrono::duration<double>(count));
  };
  testing::internal::CaptureStderr();
  clock.advance(seconds(LiveDisplay::kQuietSeconds - 1));
  display.set_activity("rollout 1/9");  // a second too early
  clock.advance(seconds(1));
  display.set_activity("rollout 2/9");
  display.set_activity("rollout 3/9");  // directly after a line
  display.write(1, {{"reward/mean", 0.5}});
  clock.advance(seconds(LiveDisplay::kQuietSeconds));
  display.set_activity("");
  display.set_activity("comparison");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "rollout 2/9\nstep 1/100  reward 0.500\ncomparison\n");
}

TEST(LiveDisplay, TimeLeftFollowsTheLastSteps) {
  FakeClock clock;
  LiveDisplay display(1000, clock, DisplayStyle::kSilent);
  for (int64_t step = 1; step <= 20; ++step) display.write(step, {{"time/step", 100.0}});
  for (int64_t step = 21; step <= 40; ++step) display.write(step, {{"time/step", 1.0}});
  EXPECT_EQ(display.line(40, {}), "step 40/1000  left 16:00");
}

TEST(LiveDisplay, TheTableKeepsTheLastRowsAndFits) {
  FakeClock clock;
  LiveDisplay display(100, clock, DisplayStyle::kTable);
  clock.sleep_for(std::chrono::seconds(75));
  for (int64_t step = 1; step <= 50; ++step) display.write(step, kStep);
  display.set_activity("rollout 37/128");
  const std::string table = display.table(80);
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 9);
  EXPECT_NE(table.find("     50/100   0.412    0.500    87.2       3.10x    12.3k    3.2 s      2:40\n"),
            std::string::npos)
      << table;
  EXPECT_EQ(table.find("     42/100"), std::string::npos);
  EXPECT_NE(table.find("50%  1:15 elapsed  rollout 37/128"), std::string::npos) << table;
  std::istringstream narrow(display.table(40));
  for (std::string line; std::getline(narrow, line);) EXPECT_LE(display_width(line), 40) << line;
}

TEST(ChangedSettings, ListsOnlyWhatDiffersFromTheDefaults) {
  const std::vector<SettingRow> rows = {{"seed", "1", "", true},
                                        {"actor.optimizer.lr", "1.0e-04", "", false},
                                        {"reward", "\"a b\"", "", false},
                                        {"path", std::string(50, 'p'), "", false}};
  EXPECT_EQ(changed_settings("settings (all: runs/a/b/config.yaml):", rows, 30),
            "settings (all: runs/a/b/config.yaml):\n"
            "  actor.optimizer.lr: 1.0e-04\n"
            "  reward: \"a b\"\n"
            "  path: " +
                std::string(21, 'p') + "…");
}

}  // namespace
}  // namespace bough

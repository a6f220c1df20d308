#include "report/run_control.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>

#include "base/base_test_util.h"
#include "base/error.h"
#include "base/file.h"

namespace bough {
namespace {

// A run's folder, and a run that works in it.
class RunControl : public ::testing::Test {
 protected:
  RunControl() { clear_control_folder(run()); }
  const std::filesystem::path& run() const { return folder_.path(); }

  TemporaryFolder folder_;
  std::optional<FolderLock> lock_ = std::optional<FolderLock>(std::in_place, folder_.path());
  FakeClock clock_;
  ControlQueue queue_{folder_.path(), clock_};
};

TEST_F(RunControl, ARequestIsTakenOnceAndAnswered) {
  ControlRequest first(run(), "pause"), second(run(), "stop");
  const auto requests = queue_.take();
  ASSERT_EQ(requests.size(), 2u);
  EXPECT_EQ(requests[0].command, "pause");
  EXPECT_EQ(requests[1].command, "stop");
  EXPECT_FALSE(first.poll());
  queue_.answer(requests[0].id, {.done = true, .text = "paused after step 3"});
  EXPECT_FALSE(second.poll()) << "the answer is the other one's";
  const auto answer = first.poll();
  ASSERT_TRUE(answer);
  EXPECT_TRUE(answer->done);
  EXPECT_EQ(answer->text, "paused after step 3");
  EXPECT_TRUE(queue_.take().empty()) << "it looks again later";
  clock_.advance(std::chrono::seconds(1));
  EXPECT_TRUE(queue_.take().empty());
}

TEST_F(RunControl, AClientThatGoesWithdrawsItsRequest) {
  { const ControlRequest request(run(), "pause"); }
  EXPECT_TRUE(queue_.take().empty());
}

TEST_F(RunControl, ARunThatIsNotAliveIsRefusedAndOneThatEndsIsNoticed) {
  ControlRequest request(run(), "pause");
  lock_.reset();
  const auto answer = request.poll();
  ASSERT_TRUE(answer);
  EXPECT_FALSE(answer->done);
  EXPECT_EQ(answer->text, "the run ended before it answered");
  try {
    const ControlRequest late(run(), "pause");
    FAIL();
  } catch (const UserError& error) {
    expect_names(error.what(), {"not alive"});
  }
}

TEST_F(RunControl, OnlyTheFiveCommandsAreTaken) {
  EXPECT_THROW(ControlRequest(run(), "delete"), UserError);
  std::ofstream(run() / "control" / "1.request") << "{\"command\"";  // damaged
  const auto requests = queue_.take();
  ASSERT_EQ(requests.size(), 1u);
  EXPECT_EQ(requests[0].command, "") << "the run refuses it";
}

TEST_F(RunControl, TheFolderIsTheUsersAlone) {
  struct stat status {};
  ASSERT_EQ(::stat((run() / "control").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
  std::ofstream(run() / "control" / "1.request") << "{}";
  clear_control_folder(run());
  EXPECT_TRUE(std::filesystem::is_empty(run() / "control")) << "requests to an earlier process are void";
}

}  // namespace
}  // namespace bough

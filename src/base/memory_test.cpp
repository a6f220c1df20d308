#include "base/memory.h"
#include "base/base_test_util.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

namespace bough {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

constexpr const char* kVersion1Mount =
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n";
constexpr const char* kVersion2Mount =
    "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw\n";

// A root folder with a machine of 64 GiB, 40 GiB of them available.
class HostMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    write("proc/meminfo",
          "MemTotal:       67108864 kB\nMemFree:         1048576 kB\nMemAvailable:   41943040 kB\n");
  }

  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void expect(int64_t available, int64_t limit, const std::string& limited_by) {
    const HostMemory memory = host_memory(root_);
    EXPECT_EQ(memory.available, available);
    EXPECT_EQ(memory.limit, limit);
    EXPECT_EQ(memory.limited_by, limited_by);
  }

  const TemporaryFolder temporary_;
  const fs::path root_ = temporary_.path();
};

TEST_F(HostMemoryTest, IsTheMachinesWithoutControlGroups) {
  expect(40 * kGiB, 64 * kGiB, "/proc/meminfo");
}

TEST_F(HostMemoryTest, OfKernelsWithoutMemAvailableIsFreeMemoryAndCache) {
  write("proc/meminfo", "MemTotal: 67108864 kB\nMemFree: 1048576 kB\nCached: 2097152 kB\n");
  expect(3 * kGiB, 64 * kGiB, "/proc/meminfo");
}

TEST_F(HostMemoryTest, ReadsTheLimitOfAVersion2Group) {
  write("proc/self/mountinfo", kVersion2Mount);
  write("proc/self/cgroup", "0::/job.slice/step\n");
  write("sys/fs/cgroup/job.slice/step/memory.max", std::to_string(16 * kGiB) + "\n");
  write("sys/fs/cgroup/job.slice/step/memory.high", "max\n");
  write("sys/fs/cgroup/job.slice/step/memory.current", std::to_string(10 * kGiB) + "\n");
  write("sys/fs/cgroup/job.slice/step/memory.stat",
        "anon 1\ninactive_file " + std::to_string(4 * kGiB) + "\nactive_file 7\n");
  expect(10 * kGiB, 16 * kGiB, "/sys/fs/cgroup/job.slice/step/memory.max");
}

TEST_F(HostMemoryTest, ReadsTheSmallestLimitOfTheGroupsAbove) {
  write("proc/self/mountinfo", kVersion2Mount);
  write("proc/self/cgroup", "0::/job.slice/step\n");
  write("sys/fs/cgroup/job.slice/step/memory.max", "max\n");
  write("sys/fs/cgroup/job.slice/step/memory.current", std::to_string(kGiB));
  write("sys/fs/cgroup/job.slice/memory.max", std::to_string(8 * kGiB));
  write("sys/fs/cgroup/job.slice/memory.current", std::to_string(7 * kGiB));
  expect(kGiB, 8 * kGiB, "/sys/fs/cgroup/job.slice/memory.max");
}

TEST_F(HostMemoryTest, CountsTheThrottlingLimitOfAVersion2Group) {
  write("proc/self/mountinfo", kVersion2Mount);
  write("proc/self/cgroup", "0::/unit\n");
  write("sys/fs/cgroup/unit/memory.max", std::to_string(16 * kGiB));
  write("sys/fs/cgroup/unit/memory.high", std::to_string(12 * kGiB));
  write("sys/fs/cgroup/unit/memory.current", std::to_string(2 * kGiB));
  expect(10 * kGiB, 12 * kGiB, "/sys/fs/cgroup/unit/memory.high");
}

TEST_F(HostMemoryTest, ReadsTheLimitOfAVersion1Group) {
  write("proc/self/mountinfo", std::string(kVersion1Mount) +
                                   "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
                                   "36 31 0:33 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n");
  write("proc/self/cgroup", "9:name=systemd:/\n4:memory:/slurm/job_7\n1:cpu:/other\n0::/\n");
  write("sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes", std::to_string(20 * kGiB));
  write("sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes", std::to_string(6 * kGiB));
  write("sys/fs/cgroup/memory/slurm/job_7/memory.stat",
        "inactive_file 5\ntotal_inactive_file " + std::to_string(kGiB) + "\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "50000000000\n");
  expect(15 * kGiB, 20 * kGiB, "/sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes");
}

TEST_F(HostMemoryTest, ReadsALimitAboveTheMountedVersion1Group) {
  // As in a container without its own namespace: the path of the group exists on the host only.
  write("proc/self/mountinfo",
        "35 31 0:32 /kubepods/pod\\1341/c /sys/fs/cgroup/memory ro master:1 - cgroup cgroup rw,memory\n");
  write("proc/self/cgroup", "4:memory:/kubepods/pod\\1/c\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(kGiB));
  write("sys/fs/cgroup/memory/memory.stat", "hierarchical_memory_limit " + std::to_string(4 * kGiB) + "\n");
  expect(3 * kGiB, 4 * kGiB, "/sys/fs/cgroup/memory/memory.stat");
}

TEST_F(HostMemoryTest, ReadsTheMountedGroupIfTheProcessIsInAnotherTree) {
  write("proc/self/mountinfo", kVersion2Mount);
  write("proc/self/cgroup", "0::/../../elsewhere\n");
  write("sys/fs/cgroup/memory.max", std::to_string(2 * kGiB));
  write("sys/fs/cgroup/memory.current", std::to_string(3 * kGiB));
  expect(0, 2 * kGiB, "/sys/fs/cgroup/memory.max");
}

TEST_F(HostMemoryTest, IgnoresLimitsOverTheMachinesMemory) {
  write("proc/self/mountinfo", kVersion2Mount);
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/memory.max", "99999999999999999999\n");
  write("sys/fs/cgroup/memory.current", std::to_string(60 * kGiB));
  expect(40 * kGiB, 64 * kGiB, "/proc/meminfo");
  write("sys/fs/cgroup/memory.max", std::to_string(200 * kGiB));
  expect(40 * kGiB, 64 * kGiB, "/proc/meminfo");
}

TEST_F(HostMemoryTest, OfFilesWithoutSenseIsTheMachines) {
  write("proc/self/mountinfo", "x\n\n35 31 0:32 / /sys/fs/cgroup\n" + std::string(kVersion2Mount));
  write("proc/self/cgroup", "nonsense\n0:\n0::/\n");
  write("sys/fs/cgroup/memory.max", "\n");
  expect(40 * kGiB, 64 * kGiB, "/proc/meminfo");
  fs::remove_all(root_ / "proc");
  const HostMemory memory = host_memory(root_);  // of this machine
  EXPECT_GT(memory.limit, 0);
  EXPECT_EQ(memory.available, memory.limit);
}

TEST(HostMemory, OfThisMachineIsPositiveAndWithinItsLimit) {
  const HostMemory memory = host_memory();
  EXPECT_GT(memory.available, 0);
  EXPECT_LE(memory.available, memory.limit);
}

}  // namespace
}  // namespace bough

#include "env/launch.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/close_range.h>
#include <linux/keyctl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/error.h"

namespace bough {

void no_descriptor(const char* what) {
  throw IoError(str("sandbox: cannot make a ", what, ": ", std::strerror(errno)));
}

Pipe::Pipe() {
  std::array<int, 2> ends;
  if (pipe2(ends.data(), O_CLOEXEC) != 0) no_descriptor("pipe");
  read.value = ends[0];
  write.value = ends[1];
  fcntl(read.value, F_SETFL, O_NONBLOCK);
}

Descriptor memory_file(std::string_view content) {
  Descriptor file(memfd_create("input", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.value < 0) no_descriptor("file in memory");
  while (!content.empty()) {
    const ssize_t n = write(file.value, content.data(), content.size());
    if (n < 0 && errno != EINTR) no_descriptor("memory");
    if (n > 0) content.remove_prefix(static_cast<size_t>(n));
  }
  lseek(file.value, 0, SEEK_SET);
  fcntl(file.value, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL);
  return file;
}

std::optional<uid_t> spare_user() {
  if (geteuid() != 0) return std::nullopt;
  static std::atomic<uint32_t> next{0};
  const uint32_t slot = next++ % 1024;
  const uint64_t wanted = 0x60000000u + ((static_cast<uint64_t>(getpid()) & 0xffff) << 10) + slot;
  std::ifstream map("/proc/self/uid_map");
  uint64_t inside, outside, count, last = 65533;
  while (map >> inside >> outside >> count) {
    if (wanted >= inside && wanted < inside + count) return static_cast<uid_t>(wanted);
    last = inside + count - 1;
  }
  if (last == 0) return std::nullopt;  // only the container's root is mapped
  return static_cast<uid_t>(last - slot % std::max<uint64_t>(1, last / 4));
}

void end_child(int status) {
  for (;;) syscall(SYS_exit_group, status);
}

void launch(const Launch& launch) {
  int failed = 0;
  const auto check = [&](bool good) {
    if (!good && failed == 0) failed = errno;
  };
  setpgid(0, 0);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  // Moves the descriptors above the numbers that they will get.
  constexpr int kAbove = 256;
  const int num = static_cast<int>(launch.descriptors.size());
  std::array<int, 64> moved;
  const int error_pipe = fcntl(launch.error_pipe, F_DUPFD_CLOEXEC, kAbove);
  for (int i = 0; i < num; ++i)
    moved[i] = launch.descriptors[i] < 0 ? -1 : fcntl(launch.descriptors[i], F_DUPFD_CLOEXEC, kAbove);
  for (int i = 0; i < num; ++i) {
    if (launch.descriptors[i] < 0) close(i);
    else check(dup2(moved[i], i) == i);  // the copy stays open across exec
  }
  check(close_range(static_cast<unsigned>(num), ~0u, CLOSE_RANGE_CLOEXEC) == 0);
  // Raw system calls: glibc's versions would signal threads that do not exist in the child.
  if (launch.user) {
    const uid_t user = *launch.user;
    check(syscall(SYS_setgroups, 0, nullptr) == 0);
    check(syscall(SYS_setresgid, user, user, user) == 0);
    check(syscall(SYS_setresuid, user, user, user) == 0);
  }
  // Hides this session's keys; the call may be missing.
  syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, nullptr);
  check(chdir(launch.folder.c_str()) == 0);
  // After the change of user, which resets the setting.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launch.parent) end_child(127);
  for (const auto& [resource, value] : launch.limits) {
    rlimit limit{};
    getrlimit(resource, &limit);
    limit.rlim_cur = limit.rlim_max = std::min(value, limit.rlim_max);
    check(setrlimit(resource, &limit) == 0);
  }
  if (failed == 0) {
    execve(launch.argv[0], launch.argv.data(), launch.environment.data());
    failed = errno;
  }
  [[maybe_unused]] const ssize_t written = write(error_pipe, &failed, sizeof failed);
  end_child(127);
}

}  // namespace bough

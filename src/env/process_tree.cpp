#include "env/process_tree.h"

#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "env/launch.h"

namespace bough {

namespace {

using std::chrono::milliseconds;

bool wait_until(milliseconds limit, const auto& condition) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

}  // namespace

std::optional<uint64_t> start_time(pid_t pid) {
  std::ifstream file(str("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  const size_t name_end = line.rfind(')');  // the name may contain any character
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 2));
  std::string skipped, state;
  fields >> state;
  if (state == "Z" || state == "X") return std::nullopt;
  for (int i = 0; i < 18; ++i) fields >> skipped;
  uint64_t time = 0;
  if (!(fields >> time)) return std::nullopt;
  return time;
}

std::vector<pid_t> process_tree(pid_t pid) {
  std::vector<pid_t> tree{pid};
  constexpr size_t kMost = 10'000;
  for (size_t i = 0; i < tree.size() && tree.size() < kMost; ++i) {
    std::error_code error;
    for (const auto& task : std::filesystem::directory_iterator(str("/proc/", tree[i], "/task"), error)) {
      std::ifstream file(task.path() / "children");
      for (pid_t child; file >> child;) tree.push_back(child);
    }
  }
  return tree;
}

int64_t resident_bytes(pid_t pid) {
  std::ifstream file(str("/proc/", pid, "/statm"));
  int64_t total = 0, resident = 0, shared = 0;
  file >> total >> resident >> shared;
  return std::max<int64_t>(0, resident - shared) * sysconf(_SC_PAGESIZE);
}

bool ended(pid_t pid) {
  siginfo_t info{};
  return waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == pid;
}

// The child, which Bough started, is stopped first. It then reaps no child, so that the process ids of its
// children stay valid while they are killed. When the first process of the sandbox is killed, its whole
// namespace ends.
void kill_tree(pid_t pid, milliseconds limit) {
  if (!ended(pid)) {
    kill(pid, SIGSTOP);
    wait_until(milliseconds(200), [&] {
      siginfo_t info{};
      return ended(pid) || (waitid(P_PID, static_cast<id_t>(pid), &info, WSTOPPED | WNOHANG | WNOWAIT) == 0 &&
                            info.si_pid == pid);
    });
    const std::vector<pid_t> children = process_tree(pid);
    std::vector<std::pair<pid_t, std::optional<uint64_t>>> times;
    for (const pid_t each : children) times.emplace_back(each, start_time(each));
    for (const pid_t each : children)
      if (each != pid) kill(each, SIGKILL);
    wait_until(limit, [&] {
      return std::all_of(times.begin(), times.end(), [&](const auto& each) {
        return each.first == pid || !each.second || start_time(each.first) != each.second;
      });
    });
    kill(pid, SIGKILL);
  }
  wait_until(limit, [&] { return ended(pid); });
}

void kill_user(uid_t user) {
  const pid_t killer = fork();
  if (killer == 0) {
    if (syscall(SYS_setresuid, user, user, user) == 0) kill(-1, SIGKILL);
    end_child(0);
  }
  if (killer > 0) waitpid(killer, nullptr, 0);
}

}  // namespace bough

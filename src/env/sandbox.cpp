#include "env/sandbox.h"

#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "env/launch.h"
#include "env/process_tree.h"

namespace bough {

namespace {

using WallClock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kErrorsKept = 4096;
constexpr milliseconds kWatch{20};  // interval of counting memory and processes
constexpr milliseconds kReapLimit{2000};
constexpr const char* kPath = "/usr/local/bin:/usr/bin:/bin";

// The limit of processes counts in the sandbox's own user namespace only if it is set inside the sandbox. The
// option is -p in dash and -u in bash. If neither exists, the periodic count enforces the limit. Descriptor 4
// reports that the sandbox is ready.
constexpr const char* kLaunch =
    "ulimit -p \"$1\" 2>/dev/null || ulimit -u \"$1\" 2>/dev/null; shift; "
    "echo started >&4; exec 4>&-; exec \"$@\"";

bool read_some(int descriptor, std::string& into) {
  std::array<char, 1 << 16> buffer;
  for (int i = 0; i < 16; ++i) {
    const ssize_t n = read(descriptor, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN;
    if (n == 0) return false;
    into.append(buffer.data(), static_cast<size_t>(n));
  }
  return true;
}

void keep_last(std::string& text, size_t size) {
  if (text.size() > size) text.erase(0, text.size() - size);
}

std::string find_bwrap(const std::string& setting) {
  if (!setting.empty()) return access(setting.c_str(), X_OK) == 0 ? setting : "";
  const char* path = getenv("PATH");
  std::istringstream folders(str(path == nullptr ? "" : path, ":/usr/bin"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string candidate = folder + "/bwrap";
    if (!folder.empty() && access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "";
}

int64_t bytes_or(const Bytes& bytes, int64_t otherwise) {
  return bytes.is_auto() ? otherwise : bytes.count;
}

constexpr std::string_view kRemedy =
    "\n  bubblewrap missing: apt-get install bubblewrap (0.6 or newer)"
    "\n  Ubuntu 24.04 and later: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    "\n  user namespaces off: sysctl -w user.max_user_namespaces=10000, and on older Debian "
    "kernel.unprivileged_userns_clone=1"
    "\n  in Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined"
    "\n  or let programs run without a sandbox, if what they can do to this machine does not matter: "
    "allow_unsandboxed: true";

}  // namespace

std::string SandboxResult::describe() const {
  std::string last = errors;
  while (!last.empty() && std::isspace(static_cast<unsigned char>(last.back()))) last.pop_back();
  last.erase(0, last.rfind('\n') + 1);
  const std::string said = last.empty() ? "" : str(": ", quoted(last));
  switch (end) {
    case End::kExited:
      if (status > 128 && status < 128 + 65)
        return str("was ended by signal ", status - 128, " (", strsignal(status - 128), ")", said);
      return str("ended with status ", status, said);
    case End::kTimedOut: return str("took longer than ", std::round(seconds * 10) / 10, " s");
    case End::kMemory: return "used more memory than sandbox.memory allows";
    case End::kProcesses: return "started more processes than sandbox.processes allows";
    case End::kOutput: return "printed more than sandbox.output allows";
    case End::kStopped: return "was stopped";
    case End::kNotStarted: return str("could not be started", said);
  }
  return "";
}

Sandbox::Sandbox(const SandboxSettings& settings)
    : settings_(settings), bwrap_(find_bwrap(settings.bubblewrap)) {
  settings_.memory.count = bytes_or(settings_.memory, int64_t{1} << 30);
  settings_.address_space.count = bytes_or(settings_.address_space, settings_.memory.count);
  settings_.disk.count = bytes_or(settings_.disk, int64_t{64} << 20);
  settings_.output.count = bytes_or(settings_.output, int64_t{8} << 20);
  if (settings_.disk.count < 1 << 20)
    throw UserError(str("sandbox: disk is ", settings_.disk.to_string(), ", expected at least 1MiB"));
  for (const std::string& path : settings_.read_only_paths) {
    if (path.empty() || path[0] != '/' || access(path.c_str(), F_OK) != 0)
      throw UserError(
          str("sandbox: read_only_paths: got ", quoted(path), ", expected the absolute path of a folder"));
  }
  if (bwrap_.empty()) {
    why_not_ = settings_.bubblewrap.empty() ? "there is no program bwrap on PATH"
                                            : str("cannot execute ", quoted(settings_.bubblewrap));
  } else {
    sandboxed_ = true;
    for (const bool disable : {true, false}) {
      disable_user_namespaces_ = disable;
      const SandboxResult result = run({.command = {"true"}, .seconds = 30});
      if (result.ok()) return;
      if (why_not_.empty() || !disable) why_not_ = result.describe();
    }
    sandboxed_ = false;
  }
  if (!settings_.allow_unsandboxed)
    throw UserError(str("sandbox: no program can be run safely on this machine: ", why_not_, kRemedy));
}

std::vector<std::string> Sandbox::box_arguments() const {
  std::vector<std::string> box{bwrap_,          "--unshare-user", "--unshare-pid",       "--unshare-ipc",
                               "--unshare-net", "--unshare-uts",  "--unshare-cgroup-try"};
  const auto add = [&](std::initializer_list<std::string> words) { box.insert(box.end(), words); };
  if (disable_user_namespaces_) add({"--disable-userns"});
  add({"--die-with-parent", "--new-session", "--uid", "1000", "--gid", "1000", "--hostname", "box"});
  add({"--clearenv", "--setenv", "PATH", kPath, "--setenv", "HOME", "/tmp", "--setenv", "TMPDIR", "/tmp",
       "--setenv", "LANG", "C.UTF-8"});
  add({"--ro-bind", "/usr", "/usr"});
  for (const std::string folder : {"/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"}) {
    std::error_code error;
    if (std::filesystem::is_symlink(folder, error))
      add({"--symlink", std::filesystem::read_symlink(folder, error).string(), folder});
    else if (std::filesystem::is_directory(folder, error)) add({"--ro-bind", folder, folder});
  }
  for (const std::string file : {"/etc/ld.so.cache", "/etc/alternatives"}) add({"--ro-bind-try", file, file});
  const std::string disk = std::to_string(settings_.disk.count);
  add({"--proc", "/proc", "--dev", "/dev", "--size",
       std::to_string(std::min<int64_t>(settings_.disk.count, 8 << 20)), "--tmpfs", "/dev/shm", "--size",
       disk, "--tmpfs", "/tmp"});
  for (const std::string& path : settings_.read_only_paths) add({"--ro-bind", path, path});
  return box;
}

SandboxResult Sandbox::run(const SandboxProgram& program, std::stop_token stop) const {
  BOUGH_CHECK(!program.command.empty() && program.files.size() < 16, "command: ", program.command.size(),
              " words, files: ", program.files.size());
  SandboxResult result;
  Launch child;
  child.user = spare_user();
  child.parent = getpid();
  Pipe out, errors, started, exec_error;
  const Descriptor input = memory_file(program.input);
  child.descriptors = {input.value, out.write.value, errors.write.value, program.channel,
                       started.write.value};
  std::vector<Descriptor> contents;
  std::string folder;  // the working folder of an unsandboxed program
  struct RemoveFolder {
    const std::string& path;
    ~RemoveFolder() {
      std::error_code error;
      if (!path.empty()) std::filesystem::remove_all(path, error);
    }
  } remove_folder{folder};
  if (sandboxed_) {
    child.arguments = box_arguments();
    for (const auto& [name, content] : program.files) {
      contents.push_back(memory_file(content));
      child.arguments.insert(child.arguments.end(),
                             {"--file", std::to_string(child.descriptors.size()), "/tmp/" + name});
      child.descriptors.push_back(contents.back().value);
    }
    const std::vector<std::string> rest{"--chdir",      "/tmp", "--remount-ro", "/dev",
                                        "--remount-ro", "/",    "--",           "/bin/sh"};
    child.arguments.insert(child.arguments.end(), rest.begin(), rest.end());
  } else {
    std::string name = str(std::filesystem::temp_directory_path().string(), "/bough-program-XXXXXX");
    if (mkdtemp(name.data()) == nullptr) no_descriptor("folder for the program");
    folder = name;
    for (const auto& [file, content] : program.files) std::ofstream(folder + "/" + file) << content;
    if (child.user) {
      [[maybe_unused]] const int given = chown(folder.c_str(), *child.user, *child.user);
    }
    child.folder = folder;
    child.arguments = {"/bin/sh"};
  }
  // Without a user namespace the limit would count all processes of this user. Without a namespace it is
  // therefore set only if the program runs as a spare user.
  const bool count_processes = sandboxed_ || child.user;
  const std::string processes = count_processes ? std::to_string(settings_.processes) : "unlimited";
  for (const std::string& word : {std::string("-c"), std::string(kLaunch), std::string("sh"), processes})
    child.arguments.push_back(word);
  child.arguments.insert(child.arguments.end(), program.command.begin(), program.command.end());
  for (std::string& argument : child.arguments) child.argv.push_back(argument.data());
  child.argv.push_back(nullptr);
  // The sandboxed program can read bwrap's own environment in /proc/1/environ, so bwrap gets none of our
  // variables either.
  std::string path = str("PATH=", kPath), language = "LANG=C.UTF-8";
  child.home = str("HOME=", child.folder);
  child.environment = {path.data(), language.data(), child.home.data(), nullptr};
  const auto cpu = static_cast<rlim_t>(std::ceil(program.seconds) + 1);
  child.limits = {{RLIMIT_CPU, cpu},
                  {RLIMIT_FSIZE, static_cast<rlim_t>(settings_.disk.count)},
                  {RLIMIT_NOFILE, static_cast<rlim_t>(settings_.open_files)},
                  {RLIMIT_CORE, 0},
                  {RLIMIT_AS, static_cast<rlim_t>(settings_.address_space.count)}};
  child.error_pipe = exec_error.write.value;

  const auto begin = WallClock::now();
  const auto deadline =
      begin + std::chrono::duration_cast<WallClock::duration>(std::chrono::duration<double>(program.seconds));
  const pid_t pid = fork();
  if (pid < 0) no_descriptor("process");
  if (pid == 0) launch(child);
  setpgid(pid, pid);
  for (Descriptor* end : {&out.write, &errors.write, &started.write, &exec_error.write}) end->reset();

  std::map<pid_t, uint64_t> seen;  // processes that the program started: process id and start time
  const auto watch = [&] {
    const std::vector<pid_t> tree = process_tree(pid);
    int64_t bytes = 0;
    for (const pid_t each : tree) {
      bytes += resident_bytes(each);
      if (!sandboxed_ && each != pid)
        if (const auto time = start_time(each)) seen[each] = *time;
    }
    if (bytes > settings_.memory.count) result.end = SandboxResult::End::kMemory;
    else if (static_cast<int64_t>(tree.size()) > settings_.processes + 2)
      result.end = SandboxResult::End::kProcesses;
    else return true;
    return false;
  };
  bool out_open = true, errors_open = true, killed = false;
  auto next_watch = begin + kWatch;
  while (!killed && (out_open || errors_open || !ended(pid))) {
    std::array<pollfd, 2> polled{
        {{out_open ? out.read.value : -1, POLLIN, 0}, {errors_open ? errors.read.value : -1, POLLIN, 0}}};
    const bool nothing_open = !out_open && !errors_open;  // the program closed both and goes on
    poll(polled.data(), polled.size(), nothing_open ? 1 : static_cast<int>(kWatch.count()));
    if (polled[0].revents != 0) out_open = read_some(out.read.value, result.output);
    if (polled[1].revents != 0) errors_open = read_some(errors.read.value, result.errors);
    keep_last(result.errors, kErrorsKept);
    const auto now = WallClock::now();
    killed = true;
    if (static_cast<int64_t>(result.output.size()) > settings_.output.count)
      result.end = SandboxResult::End::kOutput;
    else if (stop.stop_requested()) result.end = SandboxResult::End::kStopped;
    else if (now >= deadline) result.end = SandboxResult::End::kTimedOut;
    else killed = false;
    if (!killed && now >= next_watch) {
      killed = !watch();
      next_watch = WallClock::now() + kWatch;
    }
    // Does not wait until the pipes close: a process that was left behind may keep them open for ever.
    if (!killed && ended(pid)) break;
  }
  result.seconds = std::chrono::duration<double>(WallClock::now() - begin).count();

  kill_tree(pid, kReapLimit);
  kill(-pid, SIGKILL);  // the process group, while its leader's id is still taken
  if (!sandboxed_ && child.user) kill_user(*child.user);
  if (!sandboxed_ && !child.user) {
    for (const auto& [each, time] : seen)
      if (start_time(each) == time) kill(each, SIGKILL);
  }
  int status = 0;
  const bool reaped = waitpid(pid, &status, WNOHANG) == pid;
  if (!killed) {
    result.end = SandboxResult::End::kExited;
    if (reaped) result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    // The sandbox's first process holds the pipe until all other processes of the sandbox have ended. The
    // output until then is read, for at most kReapLimit.
    const auto gone = WallClock::now() + (sandboxed_ ? kReapLimit : milliseconds(0));
    while (out_open && static_cast<int64_t>(result.output.size()) <= settings_.output.count) {
      pollfd more{out.read.value, POLLIN, 0};
      const auto left = std::chrono::duration_cast<milliseconds>(gone - WallClock::now()).count();
      if (poll(&more, 1, static_cast<int>(std::max<int64_t>(0, left))) <= 0) break;
      out_open = read_some(out.read.value, result.output);
    }
    read_some(errors.read.value, result.errors);
    if (static_cast<int64_t>(result.output.size()) > settings_.output.count)
      result.end = SandboxResult::End::kOutput;
  }
  keep_last(result.errors, kErrorsKept);
  if (static_cast<int64_t>(result.output.size()) > settings_.output.count)
    result.output.resize(static_cast<size_t>(settings_.output.count));
  std::string said;
  read_some(started.read.value, said);
  if (said.empty() && result.end != SandboxResult::End::kStopped) {
    int error = 0;
    if (read(exec_error.read.value, &error, sizeof error) == sizeof error)
      result.errors = str("cannot execute ", child.arguments[0], ": ", std::strerror(error));
    result.end = SandboxResult::End::kNotStarted;
  }
  return result;
}

}  // namespace bough

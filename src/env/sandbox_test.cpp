#include "env/sandbox.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/error.h"
#include "env/env_test_util.h"

namespace bough {
namespace {

using End = SandboxResult::End;

SandboxSettings without_bwrap() {
  SandboxSettings settings = allowing_unsandboxed();
  settings.bubblewrap = "/nowhere/bwrap";
  return settings;
}

SandboxResult python(const std::string& program, SandboxSettings settings = {}, double seconds = 20,
                     const std::vector<std::string>& arguments = {}) {
  std::vector<std::string> command{"/usr/bin/python3", "-I", "-B", "-c", program};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return Sandbox(settings).run({.command = command, .seconds = seconds});
}

// Number of processes on this machine whose command line contains `mark`.
int count_processes(const std::string& mark) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos || name == std::to_string(getpid()))
      continue;
    std::ifstream file(entry.path() / "cmdline", std::ios::binary);
    const std::string line((std::istreambuf_iterator<char>(file)), {});
    count += line.find(mark) != std::string::npos;
  }
  return count;
}

// Waits for the kernel to remove killed processes: the last one of a namespace may stay a zombie for a while.
int count_processes_left(const std::string& mark) {
  for (int i = 0; i < 200 && count_processes(mark) > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return count_processes(mark);
}

std::string unique_mark(const char* name) {
  return str("bough-mark-", name, "-", getpid());
}

TEST(Sandbox, RunsWithInputFilesAndStatus) {
  NEEDS_SANDBOX();
  const Sandbox sandbox({});
  const SandboxResult result =
      sandbox.run({.command = {"/bin/sh", "-c", "cat; cat a.txt; echo bad >&2; exit 3"},
                   .files = {{"a.txt", "file"}},
                   .input = "input "});
  EXPECT_EQ(result.output, "input file");
  EXPECT_EQ(result.errors, "bad\n");
  EXPECT_EQ(result.status, 3);
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.describe(), "ended with status 3: 'bad'");
  EXPECT_EQ(sandbox.run({.command = {"/bin/sh", "-c", "kill -9 $$"}}).describe(),
            "was ended by signal 9 (Killed)");
  EXPECT_NE(python("import os; os.ftruncate(0, 1 << 20)").errors.find("PermissionError"), std::string::npos);
  const std::string large(3'000'000, 'x');  // more than a pipe holds
  EXPECT_EQ(sandbox.run({.command = {"cat"}, .input = large}).output, large);
}

TEST(Sandbox, RefusesIfNoneCanBeMade) {
  SandboxSettings settings = without_bwrap();
  settings.allow_unsandboxed = false;
  try {
    Sandbox sandbox(settings);
    FAIL();
  } catch (const UserError& error) {
    const std::string message = error.what();
    EXPECT_TRUE(
        message.starts_with("sandbox: no program can be run safely on this machine: cannot execute "
                            "'/nowhere/bwrap'"))
        << message;
    EXPECT_NE(message.find("apparmor_restrict_unprivileged_userns"), std::string::npos);
    EXPECT_NE(message.find("allow_unsandboxed: true"), std::string::npos);
  }
  settings.bubblewrap = "/bin/false";  // exists, but makes no sandbox
  EXPECT_THROW(Sandbox{settings}, UserError);
  settings = {};
  settings.read_only_paths = {"/no/such/folder"};
  EXPECT_THROW(Sandbox{settings}, UserError);
}

TEST(Sandbox, LimitsHoldWithoutASandbox) {
  const Sandbox sandbox(without_bwrap());
  EXPECT_FALSE(sandbox.sandboxed());
  EXPECT_EQ(
      sandbox.run({.command = {"/bin/sh", "-c", "cat; cat a"}, .files = {{"a", "file"}}, .input = "in "})
          .output,
      "in file");
  EXPECT_EQ(sandbox.run({.command = {"sleep", "1000"}, .seconds = 0.3}).end, End::kTimedOut);
  EXPECT_NE(python("x = 'x' * (3 << 30)", without_bwrap()).errors.find("MemoryError"), std::string::npos);
  EXPECT_EQ(python("while True: print('x' * 1000)", without_bwrap()).end, End::kOutput);
  ASSERT_EQ(setenv("BOUGH_TEST_SECRET", "hunter2", 1), 0);
  EXPECT_EQ(python("import os; print(os.environ)", without_bwrap()).output.find("hunter2"),
            std::string::npos);
  EXPECT_EQ(Sandbox(without_bwrap()).run({.command = {"/bin/no-such-program"}}).status, 127);
  // Only root can run programs as another user, and only if other users are mapped.
  std::ifstream map("/proc/self/uid_map");
  uint64_t inside = 0, outside = 0, count = 0;
  map >> inside >> outside >> count;
  if (geteuid() != 0 || count < 2) return;
  // As another user, whose processes are all ended.
  const std::string mark = unique_mark("unsandboxed");
  EXPECT_NE(python("import os; print(os.getuid())", without_bwrap()).output, "0\n");
  python("import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)",
         without_bwrap(), 5, {mark});
  EXPECT_EQ(count_processes_left(mark), 0);
  const SandboxResult bomb = python(
      "import os, time\nn = 0\ntry:\n  while n < 500:\n    if os.fork() == 0: time.sleep(5)\n"
      "    n += 1\nexcept OSError: print('stopped', n < 40)",
      without_bwrap());
  EXPECT_EQ(bomb.output, "stopped True\n");
}

// An escape: a program that prints "escaped" if it gets out of the sandbox. If `outside` is set, it is also
// run without a sandbox. There it must get out, otherwise the test would prove nothing.
struct Escape {
  const char* name;
  const char* program;
  bool outside;
};

class SandboxEscape : public testing::TestWithParam<Escape> {
 protected:
  // The targets: a run's folder, a secret in the environment, a process, a server.
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / str("bough-run-", getpid());
    std::filesystem::create_directories(folder_);
    std::ofstream(folder_ / "secret") << "hunter2";
    std::filesystem::permissions(folder_, std::filesystem::perms::all);
    setenv("BOUGH_TEST_SECRET", "hunter2", 1);
    server_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (bind(server_, reinterpret_cast<sockaddr*>(&address), length) == 0) listen(server_, 8);
    getsockname(server_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
    victim_ = fork();
    if (victim_ == 0) {
      execl("/bin/sleep", "sleep", "1000", nullptr);
      _exit(127);
    }
  }
  void TearDown() override {
    kill(victim_, SIGKILL);
    waitpid(victim_, nullptr, 0);
    close(server_);
    std::filesystem::remove_all(folder_);
  }
  std::string full(const char* program) const {
    return str("import ctypes, os, signal, socket, sys, time\nRUN = '", folder_.string(), "'\nPORT = ", port_,
               "\nVICTIM = ", victim_, "\nBOUGH = ", getpid(), "\n", program);
  }

  std::filesystem::path folder_;
  int server_ = -1;
  int port_ = 0;
  pid_t victim_ = -1;
};

TEST_P(SandboxEscape, IsKeptIn) {
  NEEDS_SANDBOX();
  const auto [name, program, outside] = GetParam();
  const SandboxResult inside = python(full(program));
  EXPECT_NE(inside.end, End::kNotStarted) << inside.errors;
  EXPECT_EQ(inside.output.find("escaped"), std::string::npos) << inside.output << inside.errors;
  EXPECT_EQ(inside.errors.find("SyntaxError"), std::string::npos) << inside.errors;
  int status = 0;
  EXPECT_EQ(waitpid(victim_, &status, WNOHANG), 0) << "the other process was ended";
  EXPECT_FALSE(std::filesystem::exists(folder_ / "written"));
  if (!outside) return;
  const std::string script = (folder_ / "program.py").string();
  std::ofstream(script) << full(program);
  FILE* pipe = popen(str("timeout 20 /usr/bin/python3 -I -B ", script, " 2>&1").c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string said;
  for (int c; (c = fgetc(pipe)) != EOF;) said += static_cast<char>(c);
  pclose(pipe);
  EXPECT_NE(said.find("escaped"), std::string::npos) << "outside it does nothing either: " << said;
}

INSTANTIATE_TEST_SUITE_P(
    All, SandboxEscape,
    testing::Values(
        Escape{"read_run_folder", "print('escaped', open(RUN + '/secret').read())", true},
        Escape{"write_run_folder",
               "open(RUN + '/written', 'w').write('x'); print('escaped'); os.remove(RUN + '/written')", true},
        Escape{"write_usr", "open('/usr/bough-test', 'w'); os.remove('/usr/bough-test'); print('escaped')",
               geteuid() == 0},
        Escape{"write_root", "os.mkdir('/bough-test'); os.rmdir('/bough-test'); print('escaped')",
               geteuid() == 0},
        Escape{"home", "print('escaped' if os.listdir(os.path.expanduser('~root')) else '')", geteuid() == 0},
        Escape{"passwd", "open('/etc/passwd').read(); print('escaped')", true},
        Escape{"network", "socket.create_connection(('127.0.0.1', PORT), 2); print('escaped')", true},
        Escape{"interfaces", "print('escaped' if len(socket.if_nameindex()) > 1 else '')", false},
        Escape{"abstract_socket",
               "s = socket.socket(socket.AF_UNIX); s.connect('\\0bough-none'); print('escaped')", false},
        Escape{"other_processes",
               "print('escaped' if os.path.exists('/proc/%d/cmdline' % VICTIM) and "
               "b'sleep' in open('/proc/%d/cmdline' % VICTIM, 'rb').read() else '')",
               true},
        Escape{"environment_of_others",
               "for p in os.listdir('/proc'):\n"
               "    try:\n"
               "        if p.isdigit() and b'hunter2' in open('/proc/%s/environ' % p, 'rb').read(): "
               "print('escaped')\n"
               "    except OSError: pass",
               true},
        Escape{"own_environment", "print('escaped' if 'BOUGH_TEST_SECRET' in os.environ else '')", true},
        Escape{"signal_others", "os.kill(VICTIM, 0); print('escaped')", true},
        Escape{"kill_all",
               "try: os.kill(-1, signal.SIGKILL)\nexcept OSError: pass\nos.kill(BOUGH, 0); print('escaped')",
               false},
        Escape{"ptrace",  // PTRACE_SEIZE, then detach
               "libc = ctypes.CDLL(None, use_errno=True)\n"
               "print('escaped' if libc.ptrace(0x4206, VICTIM, 0, 0) == 0 else '')",
               geteuid() == 0},
        Escape{"mount",
               "libc = ctypes.CDLL(None)\n"
               "print('escaped' if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0 else '')",
               false},
        Escape{"remount_usr",
               "libc = ctypes.CDLL(None)\n"
               "print('escaped' if libc.mount(b'none', b'/usr', None, 32 | 4096, None) == 0 else '')",
               false},
        Escape{"new_user_namespace",
               "libc = ctypes.CDLL(None)\nprint('escaped' if libc.unshare(0x10000000) == 0 else '')", true},
        Escape{"devices",
               "os.mknod('/tmp/bough-disk-%d' % os.getpid(), 0o600 | 0o060000, os.makedev(254, 0)); "
               "print('escaped')\n"
               "os.remove('/tmp/bough-disk-%d' % os.getpid())",
               geteuid() == 0},
        Escape{"kernel_memory",
               "for d in ('/dev/mem', '/dev/kmem', '/proc/kcore', '/dev/vda', '/dev/sda', '/dev/kmsg'):\n"
               "    try:\n        if open(d, 'rb').read(1): print('escaped')\n    except OSError: pass",
               false},
        Escape{"set_user", "os.setuid(0); print('escaped' if os.getuid() == 0 else '')", geteuid() == 0},
        Escape{"suid",
               "import subprocess\nf = '/tmp/bough-id-%d' % os.getpid()\nopen(f, "
               "'wb').write(open('/usr/bin/id', 'rb').read())\n"
               "os.chmod(f, 0o4755); print('escaped' if b'euid=0' in subprocess.run([f], "
               "capture_output=True).stdout else '')",
               false},
        Escape{"symlink",
               "os.symlink(RUN, '/tmp/bough-link-%d' % os.getpid())\n"
               "try: print('escaped', open('/tmp/bough-link-%d/secret' % os.getpid()).read())\n"
               "finally: os.remove('/tmp/bough-link-%d' % os.getpid())",
               true},
        Escape{"root_of_others",
               "for p in (1, BOUGH):\n"
               "    if os.path.exists('/proc/%d/root' % p + RUN): print('escaped')",
               geteuid() == 0},
        Escape{"other_descriptors",
               "for d in os.listdir('/proc/self/fd'):\n"
               "    if int(d) > 2 and os.path.exists('/proc/self/fd/' + d): print('escaped', d)",
               false},
        Escape{"host_name", "socket.sethostname('bough'); print('escaped')", false}),
    [](const auto& info) { return info.param.name; });

TEST(SandboxLimits, ForkBomb) {
  NEEDS_SANDBOX();
  const std::string mark = unique_mark("bomb");
  // First a program that counts its forks until one is refused, then a real fork bomb.
  const SandboxResult counted = python(
      "import os, time\nn = 0\ntry:\n  while n < 500:\n    if os.fork() == 0: time.sleep(5)\n    n += 1\n"
      "except OSError: print(n)",
      {}, 20, {mark});
  ASSERT_FALSE(counted.output.empty()) << counted.describe();
  EXPECT_LT(std::stoi(counted.output), 32);
  EXPECT_GT(std::stoi(counted.output), 8);
  EXPECT_EQ(python("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", {}, 1, {mark}).end,
            End::kTimedOut);
  EXPECT_EQ(count_processes_left(mark), 0);
}

TEST(SandboxLimits, Threads) {
  NEEDS_SANDBOX();
  EXPECT_NE(python("import threading, time\nfor i in range(500): threading.Thread(target=time.sleep, "
                   "args=(5,), daemon=True).start()\n"
                   "print('escaped')")
                .output,
            "escaped\n");
}

TEST(SandboxLimits, Memory) {
  NEEDS_SANDBOX();
  SandboxSettings settings;
  settings.memory = Bytes{256 << 20};
  EXPECT_NE(python("x = bytearray(300 << 20)", settings).errors.find("MemoryError"), std::string::npos);
  EXPECT_TRUE(python("x = bytearray(100 << 20)", settings).ok());
  // Each process stays below the limit of one process, but their sum exceeds the limit of the sandbox.
  const SandboxResult many = python(
      "import os, time\nfor i in range(8):\n  if os.fork() == 0:\n    x = bytearray(b'x') * (100 << 20); "
      "time.sleep(100)\n"
      "time.sleep(100)",
      settings);
  EXPECT_EQ(many.end, End::kMemory) << many.describe();
}

TEST(SandboxLimits, Disk) {
  NEEDS_SANDBOX();
  SandboxSettings settings;
  settings.disk = Bytes{16 << 20};
  const char* fill =
      "import sys\nn = 0\ntry:\n  for i in range(100):\n    with open(sys.argv[1] + '/f%d' % i, 'wb') as f:\n"
      "      f.write(bytes(1 << 20)); n += 1\nexcept OSError: pass\nprint(n)";
  const SandboxResult tmp = python(fill, settings, 20, {"/tmp"});
  EXPECT_LE(std::stoi(tmp.output), 16);
  EXPECT_GT(std::stoi(tmp.output), 8);
  EXPECT_LE(std::stoi(python(fill, settings, 20, {"/dev/shm"}).output), 8);
  EXPECT_EQ(python(fill, settings, 20, {"/dev"}).output, "0\n");
  EXPECT_EQ(python(fill, settings, 20, {"/"}).output, "0\n");
  // One file is limited by its size.
  EXPECT_FALSE(python("f = open('/tmp/f', 'wb'); f.truncate(1 << 30)", settings).ok());
}

TEST(SandboxLimits, Output) {
  NEEDS_SANDBOX();
  SandboxSettings settings;
  settings.output = Bytes{1 << 20};
  const SandboxResult flood = python("while True: print('x' * 1000)", settings);
  EXPECT_EQ(flood.end, End::kOutput);
  EXPECT_EQ(flood.output.size(), 1u << 20);
  const SandboxResult errors = python("import sys\nwhile True: sys.stderr.write('x' * 1000)", settings, 0.5);
  EXPECT_EQ(errors.end, End::kTimedOut);
  EXPECT_LE(errors.errors.size(), 4096u);
}

TEST(SandboxLimits, Time) {
  NEEDS_SANDBOX();
  const std::string mark = unique_mark("time");
  EXPECT_EQ(python("import time; time.sleep(1000)", {}, 0.3, {mark}).end, End::kTimedOut);
  EXPECT_EQ(python("import sys; sys.stdin.read(); import time; time.sleep(1000)", {}, 0.3, {mark}).end,
            End::kTimedOut);
  EXPECT_TRUE(python("import sys; sys.stdin.read()", {}, 20).ok());  // no stdin is an empty stdin
  EXPECT_EQ(python("import signal, time\nfor s in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(s, "
                   "signal.SIG_IGN)\n"
                   "while True: time.sleep(1)",
                   {}, 0.5, {mark})
                .end,
            End::kTimedOut);
  EXPECT_EQ(
      python("import os, time\nos.close(0); os.close(1); os.close(2); time.sleep(1000)", {}, 0.3, {mark}).end,
      End::kTimedOut);
  EXPECT_EQ(count_processes_left(mark), 0);
}

TEST(SandboxLimits, CpuTimeAndFiles) {
  NEEDS_SANDBOX();
  EXPECT_EQ(python("import resource; print(resource.getrlimit(resource.RLIMIT_CPU))", {}, 2.5).output,
            "(4, 4)\n");
  EXPECT_FALSE(python("files = [open('/dev/null') for i in range(200)]; print('escaped')").ok());
  EXPECT_FALSE(python("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9999, 9999))").ok());
  EXPECT_FALSE(python("import resource; resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))").ok());
}

TEST(SandboxLimits, NothingOutlivesItsParent) {
  NEEDS_SANDBOX();
  const std::string mark = unique_mark("daemon");
  const SandboxResult result = python(
      "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    os.closerange(0, 100); "
      "time.sleep(1000)\n  os._exit(0)\n"
      "time.sleep(0.1); print('done')",
      {}, 20, {mark});
  EXPECT_EQ(result.output, "done\n");
  EXPECT_EQ(count_processes_left(mark), 0);
}

TEST(SandboxLimits, NothingOutlivesBough) {
  NEEDS_SANDBOX();
  const std::string mark = unique_mark("killed");
  const Sandbox sandbox({});
  const pid_t bough = fork();
  if (bough == 0) {
    sandbox.run(
        {.command = {"/usr/bin/python3", "-c",
                     "import os, time\nos.fork(); os.setsid() if os.getpid() > 3 else 0; time.sleep(1000)",
                     mark},
         .seconds = 1000});
    _exit(0);
  }
  for (int i = 0; i < 500 && count_processes(mark) < 4; ++i)  // bwrap twice, python twice
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_GE(count_processes(mark), 3);
  kill(bough, SIGKILL);
  waitpid(bough, nullptr, 0);
  EXPECT_EQ(count_processes_left(mark), 0);
}

TEST(SandboxLimits, NoProcessIsLeftWheneverTheLimitIsReached) {
  NEEDS_SANDBOX();
  const std::string mark = unique_mark("moment");
  const Sandbox sandbox({});
  for (int i = 0; i < 40; ++i)  // also while the sandbox is being made
    sandbox.run({.command = {"/bin/sh", "-c", "sleep 1000 & sleep 1000", mark}, .seconds = 0.001 * i});
  EXPECT_EQ(count_processes_left(mark), 0);
}

TEST(SandboxLimits, StopsWhenAsked) {
  NEEDS_SANDBOX();
  std::stop_source stop;
  std::jthread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    stop.request_stop();
  });
  EXPECT_EQ(Sandbox({}).run({.command = {"sleep", "1000"}, .seconds = 1000}, stop.get_token()).end,
            End::kStopped);
}

TEST(SandboxLimits, FromManyThreads) {
  NEEDS_SANDBOX();
  const Sandbox sandbox({});
  std::vector<std::jthread> threads;
  for (int t = 0; t < 6; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 5; ++i) {
        const std::string input = str(t, " ", i);
        const SandboxResult result =
            sandbox.run({.command = {"/bin/sh", "-c", "cat; sleep 0.02"}, .input = input});
        EXPECT_TRUE(result.ok()) << result.describe();
        EXPECT_EQ(result.output, input);
      }
    });
}

}  // namespace
}  // namespace bough

#include "base/log.h"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/spdlog.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/mutex.h"

namespace bough {
namespace {

void write_stderr(const std::string& text) {
  // Errors are ignored: a closed stderr must not stop a run.
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

// The status block: the last lines of the terminal. Erased before other output, and written again after it.
class Screen {
 public:
  void show(const std::string& block) {
    const MutexLock lock(mutex_);
    if (!stderr_is_terminal() || block == block_) return;
    write_stderr(erase() + block);
    block_ = block;
  }
  void print(const std::string& lines) {
    const MutexLock lock(mutex_);
    write_stderr(erase() + lines + block_);
  }

 private:
  std::string erase() const REQUIRES(mutex_) {
    if (block_.empty()) return "";
    // Moves to the first column of the block's first line, then clears to the end of the screen.
    const auto lines_up = std::count(block_.begin(), block_.end(), '\n');
    return (lines_up > 0 ? str("\r\033[", lines_up, "A") : std::string("\r")) + "\033[J";
  }

  Mutex mutex_;
  std::string block_ GUARDED_BY(mutex_);
};

class ScreenSink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  explicit ScreenSink(Screen& screen) : screen_(screen) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t buffer;
    formatter_->format(message, buffer);
    screen_.print({buffer.data(), buffer.size()});
  }
  void flush_() override {}

  Screen& screen_;
};

struct Logging {
  Logging() : console(std::make_shared<ScreenSink>(screen)), logger("bough", console) {
    console->set_pattern("%H:%M:%S %l: %v");
    console->set_level(spdlog::level::info);
    logger.set_level(spdlog::level::debug);
    logger.set_error_handler([](const std::string&) {});  // a log file on a full disk must not stop a run
  }

  Screen screen;
  std::shared_ptr<ScreenSink> console;
  Mutex mutex;
  spdlog::logger logger GUARDED_BY(mutex);  // spdlog does not lock its list of sinks
};

// One object per process, because a process has one stderr. It is never destroyed, so that threads may log
// while the process ends.
Logging& logging() {
  static Logging* instance = new Logging;
  return *instance;
}

void write_log(spdlog::level::level_enum level, const std::string& message) {
  Logging& log = logging();
  const MutexLock lock(log.mutex);
  log.logger.log(level, "{}", message);
}
}  // namespace

void log_debug(const std::string& message) {
  write_log(spdlog::level::debug, message);
}
void log_info(const std::string& message) {
  write_log(spdlog::level::info, message);
}
void log_warning(const std::string& message) {
  write_log(spdlog::level::warn, message);
}
void log_error(const std::string& message) {
  write_log(spdlog::level::err, message);
}

void set_log_level(LogLevel level) {
  constexpr spdlog::level::level_enum kLevels[] = {
      spdlog::level::debug, spdlog::level::info, spdlog::level::warn, spdlog::level::err, spdlog::level::off};
  logging().console->set_level(kLevels[static_cast<int>(level)]);
}

LogLevel parse_log_level(const std::string& name) {
  static const char* const kNames[] = {"debug", "info", "warning", "error", "silent"};
  for (int i = 0; i < 5; ++i)
    if (name == kNames[i]) return static_cast<LogLevel>(i);
  throw UserError(str("log level ", quoted(name), " is not one of debug, info, warning, error, silent"));
}

void set_log_file(const std::filesystem::path& path) {
  std::shared_ptr<spdlog::sinks::basic_file_sink_mt> file;
  if (!path.empty()) {
    if (std::filesystem::is_directory(path))
      throw UserError(
          str("cannot write the log ", quoted(path.string(), 300), ": expected a file, got a folder"));
    try {
      file = std::make_shared<spdlog::sinks::basic_file_sink_mt>(path.string());
    } catch (const spdlog::spdlog_ex&) {
      throw IoError(str("cannot write the log ", quoted(path.string(), 300), ": ", std::strerror(errno)));
    }
    file->set_pattern("%Y-%m-%d %H:%M:%S.%e %l: %v");
    file->set_level(spdlog::level::debug);
  }
  Logging& log = logging();
  const MutexLock lock(log.mutex);
  log.logger.sinks().resize(1);
  if (file) log.logger.sinks().push_back(file);
  log.logger.flush_on(spdlog::level::debug);  // so that a killed run keeps its last lines
}

bool stderr_is_terminal() {
  const char* term = std::getenv("TERM");
  return ::isatty(STDERR_FILENO) == 1 && term && std::strcmp(term, "dumb") != 0;
}

int terminal_columns() {
  struct winsize size = {};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

void show_status(const std::string& block) {
  logging().screen.show(block);
}

void print_line(const std::string& line) {
  logging().screen.print(line + "\n");
}

}  // namespace bough

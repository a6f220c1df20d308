#include "env/process_reward.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "env/python_worker_script.h"
#include "net/line_process.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

// A command's first processes must still run after this time. A shell that does not find the program ends
// within a few milliseconds.
constexpr std::chrono::milliseconds kRewardSettling{200};

bool is_identifier(std::string_view name) {
  const auto is_word = [](unsigned char c) { return std::isalnum(c) || c == '_' || c >= 0x80; };
  return !name.empty() && !std::isdigit(static_cast<unsigned char>(name[0])) &&
         std::all_of(name.begin(), name.end(), is_word);
}

bool is_executable(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored) && access(path.c_str(), X_OK) == 0;
}

std::optional<std::string> find_executable(const std::string& name) {
  if (name.find('/') != std::string::npos) return is_executable(name) ? std::optional(name) : std::nullopt;
  const char* variable = std::getenv("PATH");
  std::string_view path = variable == nullptr ? "/usr/local/bin:/usr/bin:/bin" : variable;
  while (!path.empty()) {
    const std::string_view folder = path.substr(0, path.find(':'));
    path.remove_prefix(std::min(folder.size() + 1, path.size()));
    const fs::path candidate = fs::path(folder.empty() ? "." : folder) / name;
    if (is_executable(candidate)) return candidate.string();
  }
  return std::nullopt;
}

// A process that speaks the line protocol.
class RewardProcess final : public RewardChannel {
 public:
  explicit RewardProcess(const std::vector<std::string>& arguments) : process_(arguments) {}

  void begin(int64_t id, const RewardRequest& request) override {
    process_.send(encode_request(id, request));
  }
  int descriptor() const override { return process_.descriptor(); }
  bool wants_to_send() const override { return process_.wants_to_send(); }

  std::optional<WorkerReply> advance() override {
    if (const auto line = process_.advance()) return parse_reply(*line);
    const auto end = process_.end();
    if (!end) return std::nullopt;
    if (!end->overflowed) return WorkerReply{.kind = WorkerReply::Kind::lost, .message = end->how};
    return WorkerReply{
        .message = str("the worker's answer has more than ", kMaxReplyBytes, " bytes without a line break")};
  }

 private:
  LineProcess process_;
};

std::unique_ptr<RewardPool> make_process_reward(const WorkerPoolOptions& options,
                                                const RewardSettings& settings,
                                                std::vector<std::string> arguments) {
  return std::make_unique<RewardPool>(options, settings, [arguments = std::move(arguments)] {
    return std::make_unique<RewardProcess>(arguments);
  });
}

}  // namespace

PythonFunction parse_python_function(const std::string& specification, const std::string& setting,
                                     const std::string& expected) {
  const size_t colon = specification.rfind(':');
  const std::string name = colon == std::string::npos ? "" : specification.substr(colon + 1);
  if (colon == 0 || !is_identifier(name))
    throw UserError(str(setting, ": got ", quoted(specification), ", expected ", expected));
  const fs::path file = fs::absolute(specification.substr(0, colon));
  std::error_code ignored;
  if (fs::is_directory(file, ignored))
    throw UserError(str(setting, ": ", file.string(), " is a directory, expected a Python file"));
  if (!fs::exists(file, ignored))
    throw UserError(
        str(setting, ": no file ", file.string(), "; relative paths start at the working directory"));
  return {file.lexically_normal().string(), name};
}

std::string find_python(const std::string& setting) {
  std::error_code ignored;  // without /proc, no .venv near the program is searched
  return find_python(setting, fs::read_symlink("/proc/self/exe", ignored).string());
}

std::string find_python(const std::string& setting, const std::string& program) {
  const char* variable = std::getenv("BOUGH_PYTHON");
  const std::string wanted = !setting.empty() ? setting : variable != nullptr ? variable : "";
  if (!wanted.empty()) {
    if (auto found = find_executable(wanted)) return *found;
    throw UserError(str(setting.empty() ? "BOUGH_PYTHON" : "python", ": got ", quoted(wanted),
                        ", which is not an executable program; expected a Python 3 interpreter"));
  }
  fs::path folder = fs::path(program).parent_path();
  for (int level = 0; level < 4 && folder.has_relative_path(); ++level) {
    folder = folder.parent_path();
    if (const fs::path candidate = folder / ".venv/bin/python3"; is_executable(candidate))
      return candidate.string();
  }
  if (auto found = find_executable("python3")) return *found;
  throw UserError("python3 is not on PATH; install Python 3.10 or later, or set BOUGH_PYTHON to one");
}

std::unique_ptr<RewardPool> make_python_reward(const std::string& specification,
                                               const RewardSettings& settings, PoolTime time) {
  const PythonFunction function = parse_python_function(specification);
  const std::string python = find_python(settings.python);
  return make_process_reward(
      {.name = specification, .announces_ready = true, .time = time}, settings,
      {python, "-u", "-c", str(kPythonWorkerStart, kPythonRewardWorker), function.file, function.name});
}

std::unique_ptr<RewardPool> make_command_reward(const std::string& command, bool ready_line,
                                                const RewardSettings& settings, PoolTime time) {
  return make_process_reward(
      {.name = command, .announces_ready = ready_line, .settling = kRewardSettling, .time = time}, settings,
      {"/bin/sh", "-c", command});
}

}  // namespace bough

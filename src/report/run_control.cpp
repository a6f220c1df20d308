#include "report/run_control.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <utility>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/file.h"
#include "base/json.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kRequestSuffix = ".request", kAnswerSuffix = ".answer";

fs::path control_folder(const fs::path& run) {
  return run / "control";
}

// Requests of one process and of several ones are in the order of their names.
fs::path new_control_path(const fs::path& run) {
  static std::atomic<int> number = 0;
  return control_folder(run) /
         str(std::llround(seconds_since_1970() * 1e6), "_", ::getpid(), "_", number.fetch_add(1));
}

fs::path with_suffix(fs::path path, std::string_view suffix) {
  return path += suffix;
}

}  // namespace

bool is_run_alive(const fs::path& run) {
  const Descriptor lock(::open((run / ".lock").c_str(), O_RDONLY | O_CLOEXEC));
  return lock.value >= 0 && ::flock(lock.value, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

void clear_control_folder(const fs::path& run) {
  const fs::path folder = control_folder(run);
  remove_tree(folder);
  if (::mkdir(folder.c_str(), 0700) != 0)
    throw IoError(str("cannot make ", folder.string(), ": ", std::generic_category().message(errno)));
}

fs::path page_url_file(const fs::path& run) {
  return control_folder(run) / "page_url";
}

fs::path model_server_file(const fs::path& run) {
  return control_folder(run) / "server.json";
}

// ---- The client.

ControlRequest::ControlRequest(fs::path run, const std::string& command)
    : run_(std::move(run)),
      request_(with_suffix(new_control_path(run_), kRequestSuffix)),
      answer_(fs::path(request_).replace_extension(kAnswerSuffix)) {
  if (std::find(kControlCommands.begin(), kControlCommands.end(), command) == kControlCommands.end())
    throw UserError(
        str("got the command ", quoted(command), ", expected pause, resume, checkpoint, evaluate or stop"));
  if (!is_run_alive(run_))
    throw UserError(str(quoted(run_.string(), 300),
                        ": the run is not alive: no process works in the folder. "
                        "The command that started the run continues it"));
  if (!fs::is_directory(control_folder(run_)))
    throw UserError(str(quoted(run_.string(), 300),
                        ": the run takes no commands: no folder control/ in it; "
                        "only `bough train` makes one"));
  write_file_atomically(request_, dump_line({{"command", command}}) + "\n");
}

ControlRequest::~ControlRequest() {
  std::error_code ignored;
  fs::remove(request_, ignored);
  fs::remove(answer_, ignored);
}

std::optional<ControlAnswer> ControlRequest::take_answer() {
  std::error_code ignored;
  if (!fs::exists(answer_, ignored)) return {};
  const Json answer = Json::parse(read_file(answer_), nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object()) return ControlAnswer{.done = false, .text = "the run's answer is damaged"};
  return ControlAnswer{.done = answer.value("done", false), .text = answer.value("text", "")};
}

std::optional<ControlAnswer> ControlRequest::poll() {
  if (auto answer = take_answer()) return answer;
  if (is_run_alive(run_)) return {};
  if (auto answer = take_answer()) return answer;  // the run's last one
  return ControlAnswer{.done = false, .text = "the run ended before it answered"};
}

// ---- The run.

ControlQueue::ControlQueue(const fs::path& run, const Clock& clock)
    : folder_(control_folder(run)), clock_(clock) {}

std::vector<ControlQueue::Request> ControlQueue::take() {
  const Clock::Time now = clock_.now();
  if (last_look_ && seconds_between(*last_look_, now) < kPollSeconds) return {};
  last_look_ = now;
  std::vector<fs::path> files;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder_, missing))
    if (entry.path().extension() == kRequestSuffix) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<Request> requests;
  for (const fs::path& file : files) {
    Json request;
    try {
      request = Json::parse(read_file(file), nullptr, /*allow_exceptions=*/false);
    } catch (const UserError&) {  // withdrawn
      continue;
    }
    remove_tree(file);
    const bool is_whole = request.is_object() && request.value("command", Json()).is_string();
    requests.push_back(
        {.id = file.stem().string(), .command = is_whole ? request["command"].get<std::string>() : ""});
  }
  return requests;
}

void ControlQueue::answer(const std::string& id, const ControlAnswer& answer) {
  write_file_atomically(folder_ / (id + std::string(kAnswerSuffix)),
                        dump_line({{"done", answer.done}, {"text", answer.text}}) + "\n");
}

}  // namespace bough

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

constexpr const char *kRequestSuffix = ".request", *kAnswerSuffix = ".answer";

// Requests of one process and of several ones are in the order of their ids.
std::string new_request_id() {
  static std::atomic<int> number = 0;
  return str(std::llround(seconds_since_1970() * 1e6), "_", ::getpid(), "_", number.fetch_add(1));
}

}  // namespace

bool is_run_alive(const fs::path& run) {
  const Descriptor lock(::open((run / ".lock").c_str(), O_RDONLY | O_CLOEXEC));
  return lock.value >= 0 && ::flock(lock.value, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

fs::path control_file(const fs::path& run, const std::string& name) {
  return run / "control" / name;
}

void clear_control_folder(const fs::path& run) {
  const fs::path folder = run / "control";
  remove_tree(folder);
  if (::mkdir(folder.c_str(), 0700) != 0)
    throw IoError(str("cannot make ", folder.string(), ": ", std::generic_category().message(errno)));
}

// ---- The client.

ControlRequest::ControlRequest(fs::path run, const std::string& command)
    : run_(std::move(run)),
      request_(control_file(run_, new_request_id() + kRequestSuffix)),
      answer_(fs::path(request_).replace_extension(kAnswerSuffix)) {
  if (std::find(kControlCommands.begin(), kControlCommands.end(), command) == kControlCommands.end())
    throw UserError(
        str("got the command ", quoted(command), ", expected pause, resume, checkpoint, evaluate or stop"));
  if (!is_run_alive(run_))
    throw UserError(str(quoted(run_.string(), 300),
                        ": the run is not alive: no process works in the folder. "
                        "The command that started the run continues it"));
  if (!fs::is_directory(request_.parent_path()))
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

std::optional<ControlAnswer> ControlRequest::poll() {
  const bool is_alive = is_run_alive(run_);  // before the look: the last thing that a run does is to answer
  std::error_code ignored;
  if (!fs::exists(answer_, ignored)) {
    if (is_alive) return {};
    return ControlAnswer{.done = false, .text = "the run ended before it answered"};
  }
  const Json answer = Json::parse(read_file(answer_), nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object()) return ControlAnswer{.done = false, .text = "the run's answer is damaged"};
  return ControlAnswer{.done = answer.value("done", false), .text = answer.value("text", "")};
}

// ---- The run.

ControlQueue::ControlQueue(const fs::path& run, const Clock& clock) : run_(run), clock_(clock) {}

std::vector<ControlQueue::Request> ControlQueue::take() {
  const Clock::Time now = clock_.now();
  if (last_look_ && seconds_between(*last_look_, now) < kPollSeconds) return {};
  last_look_ = now;
  std::vector<fs::path> files;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(run_ / "control", missing))
    if (entry.path().extension() == kRequestSuffix) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  std::vector<Request> requests;
  for (const fs::path& file : files) {
    try {
      const Json request = Json::parse(read_file(file), nullptr, /*allow_exceptions=*/false);
      const bool is_whole = request.is_object() && request.value("command", Json()).is_string();
      requests.push_back({file.stem().string(), is_whole ? request["command"].get<std::string>() : ""});
    } catch (const UserError&) {  // withdrawn
    }
    remove_tree(file);
  }
  return requests;
}

void ControlQueue::answer(const std::string& id, const ControlAnswer& answer) {
  write_file_atomically(control_file(run_, id + kAnswerSuffix),
                        dump_line({{"done", answer.done}, {"text", answer.text}}) + "\n");
}

}  // namespace bough

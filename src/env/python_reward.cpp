#include "env/python_reward.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "env/python_worker_script.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

// How long a worker whose socket closed may take to be gone, before it is taken for one that only hung up.
constexpr std::chrono::milliseconds kExitGrace{200};

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

std::string this_program() {
  std::error_code ignored;  // no /proc: then nothing is looked up beside it
  return fs::read_symlink("/proc/self/exe", ignored).string();
}

}  // namespace

PythonFunction parse_python_function(const std::string& specification) {
  const size_t colon = specification.rfind(':');
  const std::string name = colon == std::string::npos ? "" : specification.substr(colon + 1);
  if (colon == 0 || !is_identifier(name)) {
    throw UserError(
        str("reward: got ", quoted(specification), ", expected FILE.py:FUNCTION such as my_reward.py:score"));
  }
  const fs::path file = fs::absolute(specification.substr(0, colon));
  std::error_code ignored;
  if (fs::is_directory(file, ignored))
    throw UserError(str("reward: ", file.string(), " is a directory, expected a Python file"));
  if (!fs::exists(file, ignored))
    throw UserError(
        str("reward: no file ", file.string(), "; relative paths start at the working directory"));
  return {file.lexically_normal().string(), name};
}

std::string find_python(const std::string& setting, const std::string& program) {
  const char* variable = std::getenv("BOUGH_PYTHON");
  const std::string wanted = !setting.empty() ? setting : variable != nullptr ? variable : "";
  if (!wanted.empty()) {
    if (auto found = find_executable(wanted)) return *found;
    throw UserError(str(setting.empty() ? "BOUGH_PYTHON" : "python", ": got ", quoted(wanted),
                        ", which is no program that can be run; expected a Python 3 interpreter"));
  }
  fs::path folder = fs::path(program).parent_path();
  for (int level = 0; level < 4 && folder.has_relative_path(); ++level) {
    folder = folder.parent_path();
    if (const fs::path candidate = folder / ".venv/bin/python3"; is_executable(candidate))
      return candidate.string();
  }
  if (auto found = find_executable("python3")) return *found;
  throw UserError(
      "reward: a Python function needs python3, which is not on PATH; install it, or set BOUGH_PYTHON");
}

PythonReward::PythonReward(const std::string& specification, const RewardSettings& settings)
    : specification_(specification),
      function_(parse_python_function(specification)),
      settings_(settings),
      python_(find_python(settings.python, this_program())),
      workers_(static_cast<size_t>(settings.workers)),
      wake_descriptor_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_descriptor_ < 0) throw IoError(str("reward: eventfd: ", std::strerror(errno)));
  dispatcher_ = std::thread([this] { dispatch(); });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return num_started_ == workers_.size() || !start_error_.empty(); });
  if (start_error_.empty()) return;
  // The destructor does not run for an object that was never complete.
  stopping_ = true;
  lock.unlock();
  wake();
  dispatcher_.join();
  close(wake_descriptor_);
  throw UserError(str("reward ", specification_, ": ", start_error_));
}

PythonReward::~PythonReward() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
  dispatcher_.join();
  close(wake_descriptor_);
}

void PythonReward::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written =
      write(wake_descriptor_, &one, sizeof one);  // full means awake already
}

std::vector<RewardResult> PythonReward::score_all(std::span<const RewardRequest> requests) {
  if (requests.empty()) return {};
  for (const RewardRequest& request : requests)
    BOUGH_CHECK(request.problem != nullptr, "of ", requests.size());
  Batch batch{requests, std::vector<RewardResult>(requests.size())};
  std::unique_lock lock(mutex_);
  queue_.push_back(&batch);
  wake();
  changed_.wait(lock, [&] { return batch.finished == requests.size(); });
  return std::move(batch.results);
}

// ---- the dispatcher thread ----

void PythonReward::dispatch() {
  for (Worker& worker : workers_) start(worker);
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) break;
    }
    give_work();
    wait_for_events();
  }
  for (Worker& worker : workers_) stop(worker);
}

void PythonReward::start(Worker& worker) {
  stop(worker);
  try {
    worker.process = std::make_unique<WorkerProcess>(
        std::vector<std::string>{python_, "-u", "-c", kPythonWorkerScript, function_.file, function_.name});
  } catch (const IoError& error) {
    start_failed(worker, error.what());
    return;
  }
  worker.state = Worker::State::starting;
  worker.deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                       std::chrono::duration<double>(settings_.startup_timeout_seconds));
}

void PythonReward::stop(Worker& worker) {
  worker.process.reset();
  worker.incoming = {};
  worker.outgoing.clear();
  worker.state = Worker::State::stopped;
}

// Requests to idle workers, oldest batch first; stopped workers are started while requests wait.
void PythonReward::give_work() {
  std::unique_lock lock(mutex_);
  size_t waiting = 0;
  for (Batch* batch : queue_) waiting += batch->requests.size() - batch->next;
  if (waiting == 0) {
    for (Worker& worker : workers_) worker.given_up = false;
  }
  for (Worker& worker : workers_) {
    if (waiting == 0) return;
    if (worker.state == Worker::State::stopped && !worker.given_up) {
      lock.unlock();
      start(worker);
      lock.lock();
    }
    if (worker.state == Worker::State::starting) --waiting;
    if (worker.state != Worker::State::idle) continue;
    const auto batch = std::find_if(queue_.begin(), queue_.end(),
                                    [](const Batch* b) { return b->next < b->requests.size(); });
    if (batch == queue_.end()) return;
    worker.batch = *batch;
    worker.index = (*batch)->next++;
    worker.id = next_id_++;
    worker.state = Worker::State::busy;
    --waiting;
    lock.unlock();
    worker.outgoing = encode_request(worker.id, worker.batch->requests[worker.index]);
    worker.deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                         std::chrono::duration<double>(settings_.timeout_seconds));
    write_to(worker);
    lock.lock();
  }
}

void PythonReward::wait_for_events() {
  std::vector<pollfd> watched = {{wake_descriptor_, POLLIN, 0}};
  std::vector<Worker*> owners = {nullptr};
  auto nearest = Clock::time_point::max();
  for (Worker& worker : workers_) {
    if (worker.state == Worker::State::stopped) continue;
    const short events = worker.outgoing.empty() ? POLLIN : POLLIN | POLLOUT;
    watched.push_back({worker.process->descriptor(), events, 0});
    owners.push_back(&worker);
    if (worker.state != Worker::State::idle) nearest = std::min(nearest, worker.deadline);
  }
  int timeout = -1;
  if (nearest != Clock::time_point::max()) {
    // Rounded up, and cut: poll takes an int, and an early end only means another round.
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(nearest - Clock::now()).count();
    timeout = static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
  }
  poll(watched.data(), watched.size(), timeout);
  uint64_t count;
  while (read(wake_descriptor_, &count, sizeof count) > 0) {
  }
  for (size_t i = 1; i < watched.size(); ++i) {
    Worker& worker = *owners[i];
    if (watched[i].revents & (POLLIN | POLLHUP | POLLERR)) read_from(worker);
    if (worker.state == Worker::State::busy && (watched[i].revents & POLLOUT)) write_to(worker);
    check_deadline(worker);
  }
}

void PythonReward::read_from(Worker& worker) {
  std::string bytes;
  const bool open = worker.process->receive(bytes);
  worker.incoming.append(bytes);
  const WorkerProcess* process = worker.process.get();
  while (worker.process.get() == process) {  // a reply may have the worker started anew
    const auto line = worker.incoming.next();
    if (!line) break;
    handle_reply(worker, parse_reply(*line));
  }
  if (worker.process.get() != process || process == nullptr) return;
  if (worker.incoming.overflowed()) lose(worker, "the worker's answer has no end");
  else if (!open) lose(worker, str("the worker ", worker.process->end(kExitGrace)));
}

void PythonReward::handle_reply(Worker& worker, const WorkerReply& reply) {
  using Kind = WorkerReply::Kind;
  if (worker.state == Worker::State::starting && reply.kind == Kind::ready) {
    worker.state = Worker::State::idle;
    const std::lock_guard lock(mutex_);
    if (num_started_ < workers_.size()) ++num_started_;
    changed_.notify_all();
  } else if (worker.state == Worker::State::starting && reply.kind == Kind::refused) {
    start_failed(worker, reply.message);
  } else if (worker.state == Worker::State::busy && reply.id == worker.id && reply.kind == Kind::reward) {
    finish_call(worker, {reply.reward, false, ""});
  } else if (worker.state == Worker::State::busy && reply.id == worker.id && reply.kind == Kind::failure) {
    finish_call(worker, failed(reply.message));
  } else {
    lose(worker, reply.kind == Kind::malformed ? reply.message : "the worker answered what it was not asked");
  }
}

void PythonReward::write_to(Worker& worker) {
  const auto sent = worker.process->send(worker.outgoing);
  if (sent) worker.outgoing.erase(0, *sent);
  else worker.outgoing.clear();  // it has hung up; the end of its stream, read next, says how
}

void PythonReward::check_deadline(Worker& worker) {
  const bool waits = worker.state == Worker::State::starting || worker.state == Worker::State::busy;
  if (!waits || Clock::now() < worker.deadline) return;
  if (worker.state == Worker::State::busy) {
    lose(worker, str("no result within ", settings_.timeout_seconds, " s (timeout_seconds)"));
  } else {
    start_failed(
        worker, str("not loaded within ", settings_.startup_timeout_seconds, " s (startup_timeout_seconds)"));
  }
}

// The worker is of no more use, whatever it was doing.
void PythonReward::lose(Worker& worker, const std::string& why) {
  const Worker::State state = worker.state;
  if (state == Worker::State::starting) {
    start_failed(worker, why + " while loading the file");
    return;
  }
  stop(worker);
  ++num_restarts_;
  if (state != Worker::State::busy) return;  // started anew when there is work: no loop of deaths without any
  worker.state = Worker::State::busy;
  finish_call(worker, failed(why));
  start(worker);
}

void PythonReward::finish_call(Worker& worker, RewardResult result) {
  const std::lock_guard lock(mutex_);
  Batch& batch = *worker.batch;
  batch.results[worker.index] = std::move(result);
  worker.batch = nullptr;
  worker.state = Worker::State::idle;
  if (++batch.finished == batch.requests.size()) {
    std::erase(queue_, &batch);
    changed_.notify_all();  // under the lock: once it is released the caller may destroy the batch
  }
}

void PythonReward::start_failed(Worker& worker, const std::string& why) {
  stop(worker);
  {
    const std::lock_guard lock(mutex_);
    if (num_started_ < workers_.size()) {
      if (start_error_.empty()) start_error_ = why;
      changed_.notify_all();
      return;
    }
  }
  worker.given_up = true;
  const bool none_left =
      std::all_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.given_up; });
  if (none_left) fail_what_waits("the worker could not be started again: " + why);
}

void PythonReward::fail_what_waits(const std::string& why) {
  const std::lock_guard lock(mutex_);
  const std::deque<Batch*> batches = queue_;
  for (Batch* batch : batches) {
    while (batch->next < batch->requests.size()) {
      batch->results[batch->next++] = failed(why);
      ++batch->finished;
    }
    if (batch->finished == batch->requests.size()) std::erase(queue_, batch);
  }
  changed_.notify_all();
}

RewardResult PythonReward::failed(const std::string& why) const {
  return failed_reward(settings_.failure_reward, str("reward ", specification_, ": ", why));
}

}  // namespace bough

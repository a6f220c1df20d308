#include "net/worker_pool.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "base/error.h"

namespace bough {

namespace {

using State = Worker::State;

const Clock& steady_clock() {
  static const SteadyClock clock;
  return clock;
}

}  // namespace

WorkerPool::WorkerPool(WorkerPoolOptions options, WorkerPoolStart start, Open open,
                       WorkerScheduler& scheduler)
    : options_(std::move(options)),
      start_(std::move(start)),
      open_(std::move(open)),
      scheduler_(scheduler),
      clock_(options_.time.clock ? *options_.time.clock : steady_clock()),
      wake_descriptor_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_descriptor_ < 0) throw IoError(str(start_.what, ": eventfd: ", std::strerror(errno)));
  thread_ = std::thread([this] { run(); });
  std::string error;
  {
    const MutexLock lock(mutex_);
    while (num_started_ < start_.num_first && start_error_.empty()) started_.wait(mutex_);
    error = start_error_;
  }
  if (error.empty()) return;
  stop();  // the destructor does not run if the constructor throws
  throw UserError(str(start_.what, " ", options_.name, ": ", error));
}

WorkerPool::~WorkerPool() {
  stop();
}

void WorkerPool::stop() {
  {
    const MutexLock lock(mutex_);
    is_stopping_ = true;
  }
  wake();
  thread_.join();
  close(wake_descriptor_);
}

void WorkerPool::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written =
      write(wake_descriptor_, &one, sizeof one);  // if the counter is full, a wake() is still pending
}

Clock::Time WorkerPool::after(double seconds) const {
  return now() + std::chrono::duration_cast<Clock::Duration>(std::chrono::duration<double>(seconds));
}

Clock::Duration WorkerPool::retry_pause(int64_t num_attempts, int64_t max_doublings) const {
  return options_.retry_pause * (int64_t{1} << std::min(num_attempts - 1, max_doublings));
}

bool WorkerPool::is_stopping() {
  const MutexLock lock(mutex_);
  return is_stopping_;
}

bool WorkerPool::has_started() {
  const MutexLock lock(mutex_);
  return num_started_ == start_.num_first;
}

void WorkerPool::run() {
  for (int64_t i = 0; i < start_.num_first; ++i) start();
  while (!is_stopping()) {
    scheduler_.give_work();
    poll_all(scheduler_.next_due());
  }
  scheduler_.handle_end();
  workers_.clear();
}

int64_t WorkerPool::count(State state) const {
  return std::count_if(workers_.begin(), workers_.end(),
                       [state](const auto& entry) { return entry.second->state == state; });
}

Worker* WorkerPool::find_idle() const {
  for (const auto& [number, worker] : workers_)
    if (worker->state == State::kIdle) return worker.get();
  return nullptr;
}

Worker* WorkerPool::find(int64_t number) const {
  const auto found = workers_.find(number);
  return found == workers_.end() ? nullptr : found->second.get();
}

bool WorkerPool::start() {
  auto opened = std::make_unique<Worker>();
  try {
    opened->channel = open_();
  } catch (const IoError& error) {  // for example, the system cannot start a process at this time
    report_failed_start(error.what());
    return false;
  }
  opened->number = next_number_++;
  Worker& worker = *opened;
  workers_[worker.number] = std::move(opened);
  if (options_.announces_ready) worker.deadline = after(start_.timeout_seconds);
  else if (!has_started()) worker.deadline = now() + options_.settling;
  else become_ready(worker);
  return true;
}

void WorkerPool::become_ready(Worker& worker) {
  worker.state = State::kIdle;
  const MutexLock lock(mutex_);
  if (num_started_ < start_.num_first) ++num_started_;
  started_.notify_all();
}

void WorkerPool::fail_start(const Worker& worker, const std::string& why) {
  remove(worker);
  report_failed_start(why);
}

void WorkerPool::report_failed_start(const std::string& why) {
  {
    const MutexLock lock(mutex_);
    if (num_started_ < start_.num_first) {
      if (start_error_.empty()) start_error_ = why;
      started_.notify_all();
      return;
    }
  }
  scheduler_.handle_failed_start(why);
}

void WorkerPool::poll_all(Clock::Time nearest) {
  std::vector<pollfd> watched = {{wake_descriptor_, POLLIN, 0}};
  std::vector<int64_t> numbers = {-1};
  bool is_urgent = false;
  for (const auto& [number, worker] : workers_) {
    const short events = worker->channel->wants_to_send() ? POLLIN | POLLOUT : POLLIN;
    watched.push_back({worker->channel->descriptor(), events, 0});
    numbers.push_back(number);
    // A worker that answered at once is idle again: it takes the next call without a wait in poll().
    is_urgent |= worker->channel->has_come() || (worker->state == State::kIdle && scheduler_.has_waiting());
    if (worker->has_deadline()) nearest = std::min(nearest, worker->deadline);
  }
  poll(watched.data(), watched.size(), is_urgent ? 0 : poll_timeout(nearest));
  uint64_t count;
  while (read(wake_descriptor_, &count, sizeof count) > 0) {
  }
  for (size_t i = 1; i < watched.size(); ++i) {
    Worker* worker = find(numbers[i]);
    if (worker && (watched[i].revents != 0 || worker->channel->has_come())) advance(*worker);
    worker = find(numbers[i]);
    if (worker) check_deadline(*worker);
  }
}

// Milliseconds until `nearest`, rounded up: if poll() returned too early, the loop would run once more.
int WorkerPool::poll_timeout(Clock::Time nearest) const {
  const int64_t longest = options_.time.longest_poll.count();
  if (nearest == Clock::Time::max()) return options_.time.clock ? static_cast<int>(longest) : -1;
  const int64_t left = std::chrono::ceil<std::chrono::milliseconds>(nearest - now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, longest));
}

void WorkerPool::advance(Worker& worker) {
  const int64_t number = worker.number;
  while (find(number) == &worker && scheduler_.handle_reply(worker)) {
  }
}

void WorkerPool::check_deadline(Worker& worker) {
  if (!worker.has_deadline() || now() < worker.deadline) return;
  if (worker.state != State::kStarting) return scheduler_.handle_deadline(worker);
  if (!options_.announces_ready) return become_ready(worker);
  fail_start(worker, str("not loaded within ", start_.timeout_seconds, " s (", start_.timeout_setting, ")"));
}

}  // namespace bough

#include "env/reward_pool.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace bough {

namespace {

std::chrono::steady_clock::time_point in_seconds(double seconds) {
  using Clock = std::chrono::steady_clock;
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

RewardPool::RewardPool(RewardPoolOptions options, const RewardSettings& settings, Open open)
    : options_(std::move(options)),
      settings_(settings),
      open_(std::move(open)),
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
  throw UserError(str("reward ", options_.name, ": ", start_error_));
}

RewardPool::~RewardPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake();
  dispatcher_.join();
  close(wake_descriptor_);
}

void RewardPool::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written =
      write(wake_descriptor_, &one, sizeof one);  // full means awake already
}

std::vector<RewardResult> RewardPool::score_all(std::span<const RewardRequest> requests) {
  if (requests.empty()) return {};
  for (const RewardRequest& request : requests)
    BOUGH_CHECK(request.problem != nullptr, "of ", requests.size());
  Batch batch{requests, std::vector<RewardResult>(requests.size())};
  std::unique_lock lock(mutex_);
  for (size_t i = 0; i < requests.size(); ++i) waiting_.push_back({.batch = &batch, .index = i});
  wake();
  changed_.wait(lock, [&] { return batch.num_finished == requests.size(); });
  return std::move(batch.results);
}

void RewardPool::cancel() {
  {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
  }
  wake();
}

// ---- the dispatcher thread ----

void RewardPool::dispatch() {
  for (Worker& worker : workers_) start(worker);
  for (;;) {
    bool cancelled = false;
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) break;
      cancelled = cancelled_;
    }
    if (cancelled) drop_everything();
    else give_work();
    wait_for_events();
  }
  for (Worker& worker : workers_) worker.channel.reset();
}

void RewardPool::drop_everything() {
  const std::string why = "cancelled, since the run ends";
  for (Worker& worker : workers_) {
    const bool is_busy = worker.state == Worker::State::busy;
    worker.channel.reset();
    worker.state = Worker::State::stopped;
    if (is_busy) finish(worker.call, failed(why));
  }
  fail_what_waits(why);
}

void RewardPool::start(Worker& worker) {
  worker.channel.reset();
  worker.state = Worker::State::stopped;
  try {
    worker.channel = open_();
  } catch (const IoError& error) {
    start_failed(worker, error.what());
    return;
  }
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    is_first = num_started_ < workers_.size();
  }
  worker.state = Worker::State::starting;
  if (options_.announces_ready) worker.deadline = in_seconds(settings_.startup_timeout_seconds);
  else if (is_first) worker.deadline = Clock::now() + options_.settling;
  else become_ready(worker);
}

void RewardPool::become_ready(Worker& worker) {
  worker.state = Worker::State::idle;
  const std::lock_guard lock(mutex_);
  if (num_started_ < workers_.size()) ++num_started_;
  changed_.notify_all();
}

// Calls to idle workers, oldest first, but before all others the retries whose pause is over; stopped workers
// are started while calls wait.
void RewardPool::give_work() {
  std::unique_lock lock(mutex_);
  const auto is_due = [now = Clock::now()](const Call& call) { return call.not_before <= now; };
  for (const Call& call : delayed_)
    if (is_due(call)) waiting_.push_front(call);
  std::erase_if(delayed_, is_due);
  if (waiting_.empty() && delayed_.empty()) {
    for (Worker& worker : workers_) worker.given_up = false;
  }
  size_t num_starting = 0;
  for (Worker& worker : workers_) {
    if (waiting_.size() <= num_starting) return;
    if (worker.state == Worker::State::stopped && !worker.given_up) {
      lock.unlock();
      start(worker);
      lock.lock();
    }
    num_starting += worker.state == Worker::State::starting;
    if (worker.state != Worker::State::idle || waiting_.empty()) continue;
    const Call call = waiting_.front();
    waiting_.pop_front();
    lock.unlock();
    begin_call(worker, call);
    lock.lock();
  }
}

void RewardPool::begin_call(Worker& worker, const Call& call) {
  worker.call = call;
  ++worker.call.num_attempts;
  worker.id = next_id_++;
  worker.state = Worker::State::busy;
  worker.deadline = in_seconds(settings_.timeout_seconds);
  worker.channel->begin(worker.id, call.batch->requests[call.index]);
  advance(worker);
}

void RewardPool::wait_for_events() {
  std::vector<pollfd> watched = {{wake_descriptor_, POLLIN, 0}};
  std::vector<Worker*> owners = {nullptr};
  auto nearest = Clock::time_point::max();
  for (Worker& worker : workers_) {
    if (worker.state == Worker::State::stopped) continue;
    const short events = worker.channel->wants_to_send() ? POLLIN | POLLOUT : POLLIN;
    watched.push_back({worker.channel->descriptor(), events, 0});
    owners.push_back(&worker);
    if (worker.state != Worker::State::idle) nearest = std::min(nearest, worker.deadline);
  }
  for (const Call& call : delayed_) nearest = std::min(nearest, call.not_before);
  int timeout = -1;
  if (nearest != Clock::time_point::max()) {
    // Rounded up, and cut: poll takes an int, and an early end only means another round.
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(nearest - Clock::now()).count();
    timeout = static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
  }
  {
    // A worker that answered or broke as soon as it was given work takes the next call without waiting.
    const std::lock_guard lock(mutex_);
    const bool is_idle = std::any_of(workers_.begin(), workers_.end(),
                                     [](const Worker& w) { return w.state == Worker::State::idle; });
    if (!waiting_.empty() && is_idle) timeout = 0;
  }
  poll(watched.data(), watched.size(), timeout);
  uint64_t count;
  while (read(wake_descriptor_, &count, sizeof count) > 0) {
  }
  for (size_t i = 1; i < watched.size(); ++i) {
    Worker& worker = *owners[i];
    if (watched[i].revents != 0) advance(worker);
    check_deadline(worker);
  }
}

void RewardPool::advance(Worker& worker) {
  const RewardChannel* const channel = worker.channel.get();
  while (channel != nullptr && worker.channel.get() == channel) {  // a reply may have it opened anew
    const auto reply = worker.channel->advance();
    if (!reply) return;
    handle_reply(worker, *reply);
  }
}

void RewardPool::handle_reply(Worker& worker, const WorkerReply& reply) {
  using Kind = WorkerReply::Kind;
  using State = Worker::State;
  const bool is_answer = worker.state == State::busy && reply.id.value_or(worker.id) == worker.id;
  if (reply.kind == Kind::malformed || reply.kind == Kind::lost) {
    lose(worker, reply.message, reply.transient || reply.kind == Kind::lost);
  } else if (worker.state == State::starting && reply.kind == Kind::refused) {
    start_failed(worker, reply.message);
  } else if (reply.kind == Kind::ready && worker.state == State::starting) {
    become_ready(worker);
  } else if (reply.kind == Kind::ready && !options_.announces_ready) {
    // Said unasked.
  } else if (is_answer && reply.kind == Kind::reward) {
    worker.state = State::idle;
    finish(worker.call, {.reward = reply.reward});
  } else if (is_answer && reply.kind == Kind::failure) {
    worker.state = State::idle;
    fail_or_retry(worker.call, reply.message, reply.transient);
  } else {
    const std::string got = reply.id ? str(" (id ", *reply.id, ")") : "";
    const std::string expected = worker.state == State::busy ? str("; expected id ", worker.id) : "";
    lose(worker, str("the worker answered what it was not asked", got, expected), /*transient=*/false);
  }
}

void RewardPool::check_deadline(Worker& worker) {
  const bool waits = worker.state == Worker::State::starting || worker.state == Worker::State::busy;
  if (!waits || Clock::now() < worker.deadline) return;
  if (worker.state == Worker::State::busy) {
    lose(worker,
         str("no result within ", settings_.timeout_seconds,
             " s (timeout_seconds); raise it if rewards may take longer"),
         settings_.retry_timeouts);
  } else if (options_.announces_ready) {
    start_failed(worker, str("not loaded within ", settings_.startup_timeout_seconds,
                             " s (reward_service.startup_timeout_seconds)"));
  } else {
    become_ready(worker);
  }
}

// The worker is of no more use, whatever it was doing.
void RewardPool::lose(Worker& worker, const std::string& why, bool transient) {
  const Worker::State state = worker.state;
  if (state == Worker::State::starting) return start_failed(worker, why + " before its first call");
  worker.channel.reset();
  worker.state = Worker::State::stopped;
  ++num_restarts_;
  if (state != Worker::State::busy) return;  // started anew when there is work: no loop of deaths without any
  fail_or_retry(worker.call, why, transient);
  start(worker);
}

void RewardPool::fail_or_retry(Call call, const std::string& why, bool transient) {
  if (transient && call.num_attempts <= settings_.retries) {
    const auto doublings = std::min<int64_t>(call.num_attempts - 1, 6);
    call.not_before = Clock::now() + options_.retry_pause * (int64_t{1} << doublings);
    delayed_.push_back(call);
    ++num_retries_;
    return;
  }
  finish(call, failed(call.num_attempts > 1 ? str(why, " (attempt ", call.num_attempts, ")") : why));
}

void RewardPool::finish(const Call& call, RewardResult result) {
  const std::lock_guard lock(mutex_);
  Batch& batch = *call.batch;
  batch.results[call.index] = std::move(result);
  // Under the lock: once it is released the caller may destroy the batch.
  if (++batch.num_finished == batch.requests.size()) changed_.notify_all();
}

void RewardPool::start_failed(Worker& worker, const std::string& why) {
  worker.channel.reset();
  worker.state = Worker::State::stopped;
  {
    const std::lock_guard lock(mutex_);
    if (num_started_ < workers_.size()) {
      worker.given_up = true;
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

void RewardPool::fail_what_waits(const std::string& why) {
  std::vector<Call> calls = std::move(delayed_);
  delayed_.clear();
  {
    const std::lock_guard lock(mutex_);
    calls.insert(calls.end(), waiting_.begin(), waiting_.end());
    waiting_.clear();
  }
  for (const Call& call : calls) finish(call, failed(why));
}

RewardResult RewardPool::failed(const std::string& why) const {
  return failed_reward(settings_.failure_reward, str("reward ", options_.name, ": ", why));
}

}  // namespace bough

// Workers outside of this process, and the one thread that owns them. A worker is a channel to a process, to
// an endpoint, or to a server of tools. It makes one call at a time.
//
//   callers ──calls──▶ scheduler ──▶ the pool's thread ──request──▶ channel 0 .. n-1
//      ▲                              │  ▲                              │
//      └───────── results ────────────┘  └─────────── replies ──────────┘
//
// The thread never waits for one channel alone: it polls all of them, until the nearest deadline. The pool
// starts workers, polls them and watches their deadlines. A WorkerScheduler decides which worker makes which
// call and what a reply means (reward_pool.h, environment_pool.h).
//
// All functions of WorkerScheduler are called by the pool's thread. All functions of WorkerPool except
// wake() are for that thread, which calls them from within the scheduler.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/mutex.h"

namespace bough {

// Nothing here blocks. A channel's begin() and advance() have the types of its scheduler.
class WorkerChannel {
 public:
  virtual ~WorkerChannel() = default;  // ends at once what runs behind it

  virtual int descriptor() const = 0;  // for poll(); -1 if there is nothing to wait for
  virtual bool wants_to_send() const = 0;
  // A reply is there that the descriptor does not announce.
  virtual bool has_come() const { return false; }
};

struct Worker {
  enum class State {
    kStarting,
    kIdle,
    kHeld,     // a job has it, no call is being made
    kBusy,     // makes a call
    kPausing,  // makes its call again at the deadline
    kClosing,  // ends its job; idle afterwards
  } state = State::kStarting;
  int64_t number = 0;  // no other worker of the pool has or had it
  std::unique_ptr<WorkerChannel> channel;
  std::optional<uint64_t> job;  // the scheduler's number of what it works on
  Clock::Time deadline;         // if has_deadline()

  bool has_deadline() const { return state != State::kIdle && state != State::kHeld; }
};

class WorkerScheduler {
 public:
  virtual ~WorkerScheduler() = default;

  // Gives calls to idle workers and starts further workers. Runs before every poll.
  virtual void give_work() = 0;
  // A call waits that any idle worker could make.
  virtual bool has_waiting() const = 0;
  // When give_work() has to run again, whatever the workers do.
  virtual Clock::Time next_due() const { return Clock::Time::max(); }
  // Reads one reply of the channel and acts on it. False: none was there. May remove the worker.
  virtual bool handle_reply(Worker& worker) = 0;
  // The deadline of a worker that is not starting has passed.
  virtual void handle_deadline(Worker& worker) = 0;
  // A worker could not be started, after the first ones were. It is removed already.
  virtual void handle_failed_start(const std::string& why) = 0;
  // The pool ends; the workers still exist.
  virtual void handle_end() {}
};

// The time of a pool. Tests give a FakeClock and a short longest_poll.
struct PoolTime {
  const Clock* clock = nullptr;  // nullptr: the steady clock; it must outlive the pool
  // poll() ends after this time, so that an advance of the clock is seen.
  std::chrono::milliseconds longest_poll{60'000};
};

// Options that depend on the kind of channel.
struct WorkerPoolOptions {
  std::string name;              // of what the workers run, for messages
  bool announces_ready = false;  // a worker is idle only after it said that it is ready
  // If workers do not announce it, the first ones are watched for this time: a program that cannot be run
  // ends the run at its start.
  std::chrono::milliseconds settling{0};
  // Before the first retry of a call; doubles with each.
  std::chrono::milliseconds retry_pause{0};
  PoolTime time{};
};

// Options that depend on the kind of pool.
struct WorkerPoolStart {
  std::string what;       // "reward" or "environment": begins messages
  int64_t num_first = 1;  // workers that must be ready before the constructor returns
  double timeout_seconds = 120;
  std::string timeout_setting;
};

class WorkerPool {
 public:
  // Opens a channel. IoError: it cannot be had at this time.
  using Open = std::function<std::unique_ptr<WorkerChannel>()>;
  using Workers = std::map<int64_t, std::unique_ptr<Worker>>;

  // Blocks until the first workers are ready. UserError: one cannot be started, or takes too long.
  // `scheduler` must outlive the pool.
  WorkerPool(WorkerPoolOptions options, WorkerPoolStart start, Open open, WorkerScheduler& scheduler);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  void wake();  // from any thread: another round of give_work()

  const WorkerPoolOptions& options() const { return options_; }
  Clock::Time now() const { return clock_.now(); }
  Clock::Time after(double seconds) const;
  // Before attempt `num_attempts` + 1 of a call.
  Clock::Duration retry_pause(int64_t num_attempts, int64_t max_doublings) const;

  const Workers& workers() const { return workers_; }  // oldest first
  int64_t num_workers() const { return std::ssize(workers_); }
  int64_t count(Worker::State state) const;
  Worker* find_idle() const;  // the oldest one; nullptr: none is idle
  bool start();               // false: no channel could be opened, and the scheduler has been told
  void become_ready(Worker& worker);
  // The worker, which is starting, cannot be used. Removes it.
  void fail_start(const Worker& worker, const std::string& why);
  void remove(const Worker& worker) { workers_.erase(worker.number); }
  void remove_all() { workers_.clear(); }
  void advance(Worker& worker);  // the worker may be gone afterwards
  void poll_all(Clock::Time nearest);

 private:
  void run();
  void stop();
  bool is_stopping();
  bool has_started();
  Worker* find(int64_t number) const;
  int poll_timeout(Clock::Time nearest) const;
  void check_deadline(Worker& worker);
  void report_failed_start(const std::string& why);

  const WorkerPoolOptions options_;
  const WorkerPoolStart start_;
  const Open open_;
  WorkerScheduler& scheduler_;
  const Clock& clock_;
  const int wake_descriptor_;  // an eventfd: wake() interrupts poll() by it

  // For the pool's thread alone.
  Workers workers_;
  int64_t next_number_ = 0;

  Mutex mutex_;
  CondVar started_;
  int64_t num_started_ GUARDED_BY(mutex_) = 0;  // workers that have been ready once, up to num_first
  std::string start_error_ GUARDED_BY(mutex_);
  bool is_stopping_ GUARDED_BY(mutex_) = false;

  std::thread thread_;  // last: it uses all the others
};

}  // namespace bough

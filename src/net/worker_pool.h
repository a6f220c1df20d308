// A pool of workers outside of this process, and the one thread that owns them. Each worker has a channel: a
// worker process, an endpoint or an MCP server. A worker makes one call at a time.
//
//   callers ──calls──▶ scheduler ──▶ the pool's thread ──request──▶ channel 0 .. n-1
//      ▲                              │  ▲                              │
//      └───────── results ────────────┘  └─────────── replies ──────────┘
//
// The pool's thread never waits for a single channel: it polls all channels until the nearest deadline. The
// pool starts workers, polls their channels and checks their deadlines. A WorkerScheduler decides which
// worker makes which call and what a reply means (reward_pool.h, environment_pool.h).
//
// The pool's thread calls all functions of WorkerScheduler. The scheduler calls the functions of WorkerPool
// from that thread. Only wake() may be called from any thread.
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

// No function may block. Subclasses add begin() and advance() with the types of their scheduler.
class WorkerChannel {
 public:
  virtual ~WorkerChannel() = default;  // kills the process or closes the connection at once

  virtual int descriptor() const = 0;  // for poll(); -1 if there is nothing to wait for
  virtual bool wants_to_send() const = 0;
  // True if a reply has arrived that poll() on the descriptor would not report.
  virtual bool has_come() const { return false; }
};

struct Worker {
  enum class State {
    kStarting,
    kIdle,
    kHeld,     // reserved for a job (`job`), but no call is running
    kBusy,     // a call is running
    kPausing,  // repeats its call at the deadline
    kClosing,  // ends its job; idle afterwards
  } state = State::kStarting;
  int64_t number = 0;  // unique in the pool, never reused
  std::unique_ptr<WorkerChannel> channel;
  std::optional<uint64_t> job;  // the scheduler's number of the call or episode that uses the worker
  Clock::Time deadline;         // if has_deadline()

  bool has_deadline() const { return state != State::kIdle && state != State::kHeld; }
};

class WorkerScheduler {
 public:
  virtual ~WorkerScheduler() = default;

  // Gives calls to idle workers and starts further workers. Runs before every poll.
  virtual void give_work() = 0;
  // Whether a call waits that any idle worker could make.
  virtual bool has_waiting() const = 0;
  // The latest time at which give_work() must run again.
  virtual Clock::Time next_due() const { return Clock::Time::max(); }
  // Reads one reply of the channel and acts on it. Returns false if there was none. May remove the worker.
  virtual bool handle_reply(Worker& worker) = 0;
  // Called if the deadline of a worker has passed, except while the worker starts.
  virtual void handle_deadline(Worker& worker) = 0;
  // Called if a worker could not be started after the first workers were ready. The pool has removed it.
  virtual void handle_failed_start(const std::string& why) = 0;
  // The pool ends. The workers still exist.
  virtual void handle_end() {}
};

// The clock of a pool. Tests pass a FakeClock and a short longest_poll.
struct PoolTime {
  const Clock* clock = nullptr;  // must outlive the pool; nullptr: the steady clock
  // Upper bound of one poll(). A fake clock does not wake poll(), so tests set a short time.
  std::chrono::milliseconds longest_poll{60'000};
};

// Options that depend on the kind of channel.
struct WorkerPoolOptions {
  std::string name;              // the workers' program or URL, for error messages
  bool announces_ready = false;  // true: a worker is idle only after it has sent {"ready": true}
  // If announces_ready is false, the first workers count as ready after they have run for this time. So a
  // program that cannot be executed ends the run at its start.
  std::chrono::milliseconds settling{0};
  // The pause before the first retry of a call. It doubles with each retry.
  std::chrono::milliseconds retry_pause{0};
  PoolTime time{};
};

// Options that depend on the kind of pool.
struct WorkerPoolStart {
  std::string what;       // "reward" or "environment", the beginning of error messages
  int64_t num_first = 1;  // workers that must be ready before the constructor returns
  double timeout_seconds = 120;
  std::string timeout_setting;
};

class WorkerPool {
 public:
  // Opens a channel. Throws IoError if this is not possible at present.
  using Open = std::function<std::unique_ptr<WorkerChannel>()>;
  using Workers = std::map<int64_t, std::unique_ptr<Worker>>;

  // Blocks until the first workers (num_first) are ready. Throws UserError if one of them cannot be started
  // or takes longer than timeout_seconds. `scheduler` must outlive the pool.
  WorkerPool(WorkerPoolOptions options, WorkerPoolStart start, Open open, WorkerScheduler& scheduler);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  void wake();  // from any thread: makes the pool's thread run give_work() again

  const WorkerPoolOptions& options() const { return options_; }
  Clock::Time now() const { return clock_.now(); }
  Clock::Time after(double seconds) const;
  // The pause before attempt `num_attempts` + 1 of a call.
  Clock::Duration retry_pause(int64_t num_attempts, int64_t max_doublings) const;

  const Workers& workers() const { return workers_; }  // oldest first
  int64_t num_workers() const { return std::ssize(workers_); }
  int64_t count(Worker::State state) const;
  Worker* find_idle() const;  // the oldest idle worker; nullptr if none is idle
  bool start();               // false: no channel could be opened; reported as in fail_start()
  void become_ready(Worker& worker);
  // Removes a starting worker that cannot be used. Reports the failure: while the constructor waits, it
  // throws the first failure; later, calls handle_failed_start().
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
  const int wake_descriptor_;  // an eventfd by which wake() interrupts poll()

  // Used by the pool's thread only.
  Workers workers_;
  int64_t next_number_ = 0;

  Mutex mutex_;
  CondVar started_;
  int64_t num_started_ GUARDED_BY(mutex_) = 0;  // workers that have become ready; counts up to num_first
  std::string start_error_ GUARDED_BY(mutex_);
  bool is_stopping_ GUARDED_BY(mutex_) = false;

  std::thread thread_;  // last, because it uses all other members
};

}  // namespace bough

// The user's own reward, a Python function:
//
//   def score(prompt: str, completion: str, **fields) -> float
//
// `fields` are the fields of the problem's record, `answer` always among them. A function without ** gets
// only the arguments that it names. What it prints goes to stderr.
//
// It runs in worker processes, one call at a time in each. One dispatcher thread owns them all:
//
//   score_all ──batch──▶ queue ──▶ dispatcher ──request──▶ worker 0 .. n-1 (python3)
//       ▲                             │  ▲                      │
//       └───── results, in order ─────┘  └────── replies ───────┘
//
// It never waits for one worker alone: poll() over all of them, until the nearest deadline. The callers of
// score_all wait on a condition variable; mutex_ guards the queue, the batches in it and `stopping_`, and is
// never held while the dispatcher polls or starts a process.
//
// A call fails, and only that call, when the function raises, returns no finite number, exceeds
// timeout_seconds, or takes its process down. After the last two the worker is started anew. Where no worker
// can be started again (the file was changed under the run) all calls that wait fail; the next batch tries
// again.
//
// Workers die with Bough, whatever way that dies; leave no zombies; and are not reached by Ctrl-C.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "env/reward.h"
#include "env/worker_process.h"
#include "env/worker_protocol.h"

namespace bough {

// FILE.py:FUNCTION. UserError: not of that form, or no such file. `file` is absolute.
struct PythonFunction {
  std::string file;
  std::string name;
};
PythonFunction parse_python_function(const std::string& specification);

// The interpreter's path: `setting` if not empty, else $BOUGH_PYTHON, else .venv/bin/python3 in one of the
// four folders above `program`'s, else python3; names without '/' are looked up on $PATH. UserError: there is
// none.
std::string find_python(const std::string& setting, const std::string& program);

class PythonReward : public RewardFunction {
 public:
  // Blocks until every worker has loaded the file. UserError: it cannot be loaded, has no such function, or
  // takes longer than startup_timeout_seconds.
  PythonReward(const std::string& specification, const RewardSettings& settings);
  ~PythonReward() override;  // kills the workers; no score_all may be running

  std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) override;

  int64_t num_restarts() const { return num_restarts_; }

 private:
  using Clock = std::chrono::steady_clock;

  struct Batch {
    std::span<const RewardRequest> requests;
    std::vector<RewardResult> results;
    size_t next = 0;  // first request that no worker has
    size_t finished = 0;
  };
  struct Worker {
    enum class State { stopped, starting, idle, busy };
    State state = State::stopped;
    bool given_up = false;  // could not be started again; tried anew when nothing waits any more
    std::unique_ptr<WorkerProcess> process;
    Clock::time_point deadline;  // while starting or busy
    LineSplitter incoming;
    std::string outgoing;    // what of the request has not been sent
    Batch* batch = nullptr;  // while busy
    size_t index = 0;
    int64_t id = 0;
  };

  void dispatch();
  void start(Worker& worker);
  void stop(Worker& worker);
  void give_work();
  void wait_for_events();
  void read_from(Worker& worker);
  void handle_reply(Worker& worker, const WorkerReply& reply);
  void write_to(Worker& worker);
  void check_deadline(Worker& worker);
  void lose(Worker& worker, const std::string& why);
  void finish_call(Worker& worker, RewardResult result);
  void start_failed(Worker& worker, const std::string& why);
  void fail_what_waits(const std::string& why);
  RewardResult failed(const std::string& why) const;
  void wake();

  const std::string specification_;
  const PythonFunction function_;
  const RewardSettings settings_;
  const std::string python_;
  std::atomic<int64_t> num_restarts_ = 0;

  // The dispatcher alone touches these.
  std::vector<Worker> workers_;
  int64_t next_id_ = 0;
  int wake_descriptor_ = -1;  // an eventfd: score_all and the destructor interrupt poll() by it

  std::mutex mutex_;
  std::condition_variable changed_;  // a batch is finished, or the start is over
  std::deque<Batch*> queue_;         // of callers that wait in score_all
  bool stopping_ = false;
  size_t num_started_ = 0;  // workers that have been ready once
  std::string start_error_;

  std::thread dispatcher_;  // last: it uses all the others
};

}  // namespace bough

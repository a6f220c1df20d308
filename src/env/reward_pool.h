// Rewards that are computed elsewhere: in worker processes or behind an HTTP endpoint.
//
// A pool has `workers` channels, each with one call at a time. One dispatcher thread owns them all:
//
//   score_all ──calls──▶ waiting ──▶ dispatcher ──request──▶ channel 0 .. n-1 (process, connection)
//       ▲                             │  ▲                      │
//       └───── results, in order ─────┘  └────── replies ───────┘
//
// It never waits for one channel alone: poll() over all of them, until the nearest deadline. The callers of
// score_all wait on a condition variable: they are who bounds the queue, which holds no more than the calls
// of those that wait. mutex_ guards the queue, the batches in it and the flags, and is never held while the
// dispatcher polls or opens a channel.
//
// A call fails, and only that call, when the reply says so or is none, takes longer than timeout_seconds, or
// when its channel breaks. After the last two the channel is opened anew. What another attempt may mend (a
// broken channel, an endpoint's transient answer) is tried `retries` times again, never what the reply
// called an error. Where no channel can be opened again (the user's file was changed under the run) all calls
// that wait fail; the next ones try again.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "env/reward.h"
#include "env/worker_protocol.h"

namespace bough {

// Where calls run, one at a time. Nothing here blocks.
class RewardChannel {
 public:
  virtual ~RewardChannel() = default;  // ends at once what runs behind it

  // Begins a call, when the one before has been answered.
  virtual void begin(int64_t id, const RewardRequest& request) = 0;
  // For poll(); -1 while there is nothing to wait for.
  virtual int descriptor() const = 0;
  virtual bool wants_to_send() const = 0;
  // Sends and receives what can be at once. What has come: nothing yet, or a reply; the channel is of no use
  // after `refused`, `malformed` and `lost`.
  virtual std::optional<WorkerReply> advance() = 0;
};

struct RewardPoolOptions {
  std::string name;              // of what computes: begins every message
  bool announces_ready = false;  // channels are idle only after a reply `ready`
  // Of those that do not, the first are watched so long: what cannot run ends the run at its start.
  std::chrono::milliseconds settling{0};
  // Before the first retry of a call; doubles with each.
  std::chrono::milliseconds retry_pause{0};
};

class RewardPool : public RewardFunction {
 public:
  // Opens a channel; IoError: it cannot be had.
  using Open = std::function<std::unique_ptr<RewardChannel>()>;

  // Blocks until every channel is ready. UserError: one cannot be, or takes longer than
  // startup_timeout_seconds.
  RewardPool(RewardPoolOptions options, const RewardSettings& settings, Open open);
  ~RewardPool() override;  // no score_all may be running

  std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) override;
  void cancel() override;

  int64_t num_restarts() const { return num_restarts_; }  // of channels that broke or hung
  int64_t num_retries() const { return num_retries_; }    // of calls

 private:
  using Clock = std::chrono::steady_clock;

  struct Batch {  // what one caller of score_all waits for
    std::span<const RewardRequest> requests;
    std::vector<RewardResult> results;
    size_t num_finished = 0;
  };
  struct Call {
    Batch* batch = nullptr;
    size_t index = 0;
    int64_t num_attempts = 0;  // begun
    Clock::time_point not_before;
  };
  struct Worker {
    enum class State { stopped, starting, idle, busy };
    State state = State::stopped;
    bool given_up = false;  // could not be opened again; tried anew when nothing waits any more
    std::unique_ptr<RewardChannel> channel;
    Clock::time_point deadline;  // while starting or busy
    Call call;                   // while busy
    int64_t id = 0;              // of its request
  };

  void dispatch();
  void drop_everything();
  void start(Worker& worker);
  void become_ready(Worker& worker);
  void give_work();
  void begin_call(Worker& worker, const Call& call);
  void wait_for_events();
  void advance(Worker& worker);
  void handle_reply(Worker& worker, const WorkerReply& reply);
  void check_deadline(Worker& worker);
  void lose(Worker& worker, const std::string& why, bool transient);
  void fail_or_retry(Call call, const std::string& why, bool transient);
  void finish(const Call& call, RewardResult result);
  void start_failed(Worker& worker, const std::string& why);
  void fail_what_waits(const std::string& why);
  RewardResult failed(const std::string& why) const;
  void wake();

  const RewardPoolOptions options_;
  const RewardSettings settings_;
  const Open open_;
  std::atomic<int64_t> num_restarts_ = 0, num_retries_ = 0;

  // The dispatcher alone touches these.
  std::vector<Worker> workers_;
  std::vector<Call> delayed_;  // retries whose pause is not over
  int64_t next_id_ = 0;
  int wake_descriptor_ = -1;  // an eventfd: score_all and the destructor interrupt poll() by it

  std::mutex mutex_;
  std::condition_variable changed_;  // a batch is finished, or the start is over
  std::deque<Call> waiting_;         // of callers that wait in score_all
  bool stopping_ = false, cancelled_ = false;
  size_t num_started_ = 0;  // workers that have been ready once
  std::string start_error_;

  std::thread dispatcher_;  // last: it uses all the others
};

}  // namespace bough

// Rewards that are computed elsewhere: in worker processes or behind an HTTP endpoint. A WorkerPool of
// `workers` channels makes the calls. Callers of score_all wait on a condition variable. The queue is bounded
// by the calls of the callers that wait.
//
// A call fails, and no other call, if the reply says so or is none, if it takes longer than timeout_seconds,
// or if its channel breaks. After the last two the channel is opened anew. A failure that another attempt may
// not have (a broken channel, an endpoint's transient answer) is tried `retries` times again. An error that
// the reply reports is not. If no channel can be opened again (the user's file was changed under the run),
// all calls that wait fail; the next ones try again.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "env/reward.h"
#include "env/reward_protocol.h"
#include "net/worker_pool.h"

namespace bough {

class RewardChannel : public WorkerChannel {
 public:
  // Begins a call, when the one before has been answered.
  virtual void begin(int64_t id, const RewardRequest& request) = 0;
  // Sends and receives what can be at once. Returns the reply, if one has come. The channel is of no use
  // after `refused`, `malformed` and `lost`.
  virtual std::optional<WorkerReply> advance() = 0;
};

class RewardPool final : public RewardFunction, private WorkerScheduler {
 public:
  // Opens a channel; IoError: it cannot be had.
  using Open = std::function<std::unique_ptr<RewardChannel>()>;

  // Blocks until every channel is ready. UserError: one cannot be, or takes longer than
  // startup_timeout_seconds.
  RewardPool(WorkerPoolOptions options, const RewardSettings& settings, Open open);
  ~RewardPool() override = default;  // no score_all may be running

  std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) override;
  void cancel() override;

  int64_t num_restarts() const { return num_restarts_; }  // of channels that broke or hung
  int64_t num_retries() const { return num_retries_; }    // of calls

 private:
  struct Batch {  // what one caller of score_all waits for
    std::span<const RewardRequest> requests;
    std::vector<RewardResult> results;
    size_t num_finished = 0;  // guarded by mutex_
  };
  struct Call {
    Batch* batch = nullptr;
    size_t index = 0;
    int64_t num_attempts = 0;  // begun
    Clock::Time not_before{};
  };

  void give_work() override;
  bool has_waiting() const override { return !waiting_.empty(); }
  Clock::Time next_due() const override;
  bool handle_reply(Worker& worker) override;
  void handle_deadline(Worker& worker) override;
  void handle_failed_start(const std::string& why) override;

  bool take_calls();  // false: the pool is cancelled
  void drop_everything();
  void begin_call(Worker& worker, Call call);
  Call take_call(Worker& worker);  // that it makes; afterwards it is idle
  void lose(Worker& worker, const std::string& why, bool transient);
  void fail_or_retry(Call call, const std::string& why, bool transient);
  void finish(const Call& call, RewardResult result);
  void fail_what_waits(const std::string& why);
  RewardResult failed(const std::string& why) const;

  const std::string name_;
  const RewardSettings settings_;
  std::atomic<int64_t> num_restarts_ = 0, num_retries_ = 0;

  // For the pool's thread alone.
  std::deque<Call> waiting_;
  std::vector<Call> delayed_;                 // retries whose pause is not over
  std::unordered_map<uint64_t, Call> calls_;  // being made, by the id of the request, a worker's job
  uint64_t next_id_ = 0;
  int64_t num_given_up_ = 0;  // workers that could not be started again, tried anew once no call waits

  Mutex mutex_;
  CondVar finished_;
  std::vector<Call> new_calls_ GUARDED_BY(mutex_);
  bool is_cancelled_ GUARDED_BY(mutex_) = false;

  WorkerPool pool_;  // last: its thread uses all the others
};

}  // namespace bough

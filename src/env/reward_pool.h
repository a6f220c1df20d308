// Rewards that are computed in worker processes or behind an HTTP endpoint. A WorkerPool of `workers`
// channels makes the calls. Callers of score_all wait on a condition variable, so the queue has at most the
// requests of the waiting callers.
//
// A call fails in these cases. Other calls are not affected.
// - The reply reports an error. The call is not retried.
// - The reply breaks the protocol. The channel is opened anew.
// - The call takes longer than timeout_seconds. The channel is opened anew. The call is retried only if
//   retry_timeouts is set.
// - The channel breaks, or an endpoint gives a transient answer. The call is retried up to `retries` times.
// If no channel can be opened again (for example, the user's file was changed during the run), all waiting
// calls fail. Later calls try to open channels again.
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
  // Begins a call. The last call must have been answered.
  virtual void begin(int64_t id, const RewardRequest& request) = 0;
  // Sends and receives without blocking. Returns the reply if it is complete. After a reply of the kind
  // refused, malformed or lost, the channel cannot be used any more.
  virtual std::optional<WorkerReply> advance() = 0;
};

class RewardPool final : public RewardFunction, private WorkerScheduler {
 public:
  // Opens a channel. Throws IoError if this is not possible at this time.
  using Open = std::function<std::unique_ptr<RewardChannel>()>;

  // Blocks until every channel is ready. Throws UserError if a channel cannot be made ready or takes longer
  // than startup_timeout_seconds.
  RewardPool(WorkerPoolOptions options, const RewardSettings& settings, Open open);
  ~RewardPool() override = default;  // no thread may be inside score_all

  std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) override;
  void cancel() override;

  int64_t num_restarts() const { return num_restarts_; }  // restarts of channels that broke or hung
  int64_t num_retries() const { return num_retries_; }    // retries of calls

 private:
  struct Batch {  // the requests of one caller of score_all
    std::span<const RewardRequest> requests;
    std::vector<RewardResult> results;
    size_t num_finished = 0;  // guarded by mutex_
  };
  struct Call {
    Batch* batch = nullptr;
    size_t index = 0;
    int64_t num_attempts = 0;  // including the running one
    Clock::Time not_before{};
  };

  void give_work() override;
  bool has_waiting() const override { return !waiting_.empty(); }
  Clock::Time next_due() const override;
  bool handle_reply(Worker& worker) override;
  void handle_deadline(Worker& worker) override;
  void handle_failed_start(const std::string& why) override;

  bool take_calls();  // returns false if the pool is cancelled
  void drop_everything();
  void begin_call(Worker& worker, Call call);
  Call take_call(Worker& worker);  // removes the worker's running call; the worker becomes idle
  void lose(Worker& worker, const std::string& why, bool transient);
  void fail_or_retry(Call call, const std::string& why, bool transient);
  void finish(const Call& call, RewardResult result);
  void fail_what_waits(const std::string& why);
  RewardResult failed(const std::string& why) const;

  const std::string name_;
  const RewardSettings settings_;
  std::atomic<int64_t> num_restarts_ = 0, num_retries_ = 0;

  // Used by the pool's thread only.
  std::deque<Call> waiting_;
  std::vector<Call> delayed_;                 // retries whose pause is not over
  std::unordered_map<uint64_t, Call> calls_;  // running calls by request id, which is also Worker::job
  uint64_t next_id_ = 0;
  int64_t num_given_up_ = 0;  // failed starts of workers; reset to 0 when no call waits

  Mutex mutex_;
  CondVar finished_;
  std::vector<Call> new_calls_ GUARDED_BY(mutex_);
  bool is_cancelled_ GUARDED_BY(mutex_) = false;

  WorkerPool pool_;  // last, because its thread uses all other members
};

}  // namespace bough

#include "env/reward_pool.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace bough {

namespace {

using State = Worker::State;

RewardChannel& reward_channel(Worker& worker) {
  return static_cast<RewardChannel&>(*worker.channel);  // made by RewardPool::Open
}

}  // namespace

RewardPool::RewardPool(WorkerPoolOptions options, const RewardSettings& settings, Open open)
    : name_(options.name),
      settings_(settings),
      pool_(std::move(options),
            {.what = "reward",
             .num_first = settings.workers,
             .timeout_seconds = settings.startup_timeout_seconds,
             .timeout_setting = "reward_service.startup_timeout_seconds"},
            std::move(open), *this) {}

std::vector<RewardResult> RewardPool::score_all(std::span<const RewardRequest> requests) {
  if (requests.empty()) return {};
  for (const RewardRequest& request : requests)
    BOUGH_CHECK(request.problem != nullptr, "one of ", requests.size(), " requests has no problem");
  Batch batch{requests, std::vector<RewardResult>(requests.size())};
  const MutexLock lock(mutex_);
  for (size_t i = 0; i < requests.size(); ++i) new_calls_.push_back({.batch = &batch, .index = i});
  pool_.wake();
  while (batch.num_finished < requests.size()) finished_.wait(mutex_);
  return std::move(batch.results);
}

void RewardPool::cancel() {
  {
    const MutexLock lock(mutex_);
    is_cancelled_ = true;
  }
  pool_.wake();
}

// ---- the pool's thread ----

bool RewardPool::take_calls() {
  const MutexLock lock(mutex_);
  waiting_.insert(waiting_.end(), new_calls_.begin(), new_calls_.end());
  new_calls_.clear();
  return !is_cancelled_;
}

void RewardPool::drop_everything() {
  const std::string why = "cancelled because the run ends";
  pool_.remove_all();
  for (const auto& [id, call] : std::exchange(calls_, {})) finish(call, failed(why));
  fail_what_waits(why);
}

// Gives waiting calls to idle workers: first the retries whose pause is over, then the oldest calls.
void RewardPool::give_work() {
  if (!take_calls()) return drop_everything();
  const auto is_due = [now = pool_.now()](const Call& call) { return call.not_before <= now; };
  for (const Call& call : delayed_)
    if (is_due(call)) waiting_.push_front(call);
  std::erase_if(delayed_, is_due);
  if (waiting_.empty() && delayed_.empty()) num_given_up_ = 0;
  while (!waiting_.empty()) {
    if (Worker* const idle = pool_.find_idle()) {
      const Call call = waiting_.front();
      waiting_.pop_front();
      begin_call(*idle, call);
    } else {
      const bool is_enough = std::ssize(waiting_) <= pool_.count(State::kStarting);
      if (is_enough || pool_.num_workers() + num_given_up_ >= settings_.workers) return;
      pool_.start();
    }
  }
}

void RewardPool::begin_call(Worker& worker, Call call) {
  ++call.num_attempts;
  worker.job = next_id_++;
  worker.state = State::kBusy;
  worker.deadline = pool_.after(settings_.timeout_seconds);
  calls_[*worker.job] = call;
  reward_channel(worker).begin(static_cast<int64_t>(*worker.job), call.batch->requests[call.index]);
  pool_.advance(worker);
}

RewardPool::Call RewardPool::take_call(Worker& worker) {
  worker.state = State::kIdle;
  const auto found = calls_.find(*worker.job);
  const Call call = found->second;
  calls_.erase(found);
  worker.job.reset();
  return call;
}

Clock::Time RewardPool::next_due() const {
  auto nearest = Clock::Time::max();
  for (const Call& call : delayed_) nearest = std::min(nearest, call.not_before);
  return nearest;
}

bool RewardPool::handle_reply(Worker& worker) {
  using Kind = WorkerReply::Kind;
  const auto reply = reward_channel(worker).advance();
  if (!reply) return false;
  const auto job = static_cast<int64_t>(worker.job.value_or(0));
  const bool is_answer = worker.state == State::kBusy && reply->id.value_or(job) == job;
  if (reply->kind == Kind::malformed || reply->kind == Kind::lost) {
    lose(worker, reply->message, reply->transient || reply->kind == Kind::lost);
  } else if (worker.state == State::kStarting && reply->kind == Kind::refused) {
    pool_.fail_start(worker, reply->message);
  } else if (reply->kind == Kind::ready && worker.state == State::kStarting) {
    pool_.become_ready(worker);
  } else if (reply->kind == Kind::ready && !pool_.options().announces_ready) {
    // An unrequested ready message is ignored.
  } else if (is_answer && reply->kind == Kind::reward) {
    finish(take_call(worker), {.reward = reply->reward});
  } else if (is_answer && reply->kind == Kind::failure) {
    fail_or_retry(take_call(worker), reply->message, reply->transient);
  } else {
    const std::string got = reply->id ? str(" (id ", *reply->id, ")") : "";
    const std::string expected = worker.state == State::kBusy ? str("; expected id ", job) : "";
    lose(worker, str("the worker sent an unexpected reply", got, expected), /*transient=*/false);
  }
  return true;
}

void RewardPool::handle_deadline(Worker& worker) {
  lose(worker,
       str("no result within ", settings_.timeout_seconds,
           " s (timeout_seconds); raise it if rewards may take longer"),
       settings_.retry_timeouts);
}

// Removes a worker that cannot be used any more, whatever it was doing.
void RewardPool::lose(Worker& worker, const std::string& why, bool transient) {
  if (worker.state == State::kStarting) return pool_.fail_start(worker, why + " before its first call");
  ++num_restarts_;
  // An idle worker is restarted only when there is work, so that repeated crashes without work cause no loop.
  if (worker.state != State::kBusy) return pool_.remove(worker);
  const Call call = take_call(worker);
  pool_.remove(worker);
  fail_or_retry(call, why, transient);
  pool_.start();
}

void RewardPool::fail_or_retry(Call call, const std::string& why, bool transient) {
  if (transient && call.num_attempts <= settings_.retries) {
    call.not_before = pool_.now() + pool_.retry_pause(call.num_attempts, /*max_doublings=*/6);
    delayed_.push_back(call);
    ++num_retries_;
    return;
  }
  finish(call, failed(call.num_attempts > 1 ? str(why, " (attempt ", call.num_attempts, ")") : why));
}

void RewardPool::finish(const Call& call, RewardResult result) {
  const MutexLock lock(mutex_);
  Batch& batch = *call.batch;
  batch.results[call.index] = std::move(result);
  // Notifies under the lock: once the lock is released, the caller may destroy `batch`.
  if (++batch.num_finished == batch.requests.size()) finished_.notify_all();
}

void RewardPool::handle_failed_start(const std::string& why) {
  if (++num_given_up_ >= settings_.workers) fail_what_waits("the worker could not be started again: " + why);
}

void RewardPool::fail_what_waits(const std::string& why) {
  take_calls();
  for (const Call& call : std::exchange(delayed_, {})) finish(call, failed(why));
  for (const Call& call : std::exchange(waiting_, {})) finish(call, failed(why));
}

RewardResult RewardPool::failed(const std::string& why) const {
  return failed_reward(settings_.failure_reward, str("reward ", name_, ": ", why));
}

}  // namespace bough

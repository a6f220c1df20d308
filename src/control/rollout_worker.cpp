#include "control/rollout_worker.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace bough {

RolloutWorker::RolloutWorker(const RolloutWorkerParts& parts, TaskSource next_task,
                             const RolloutWorkerOptions& options)
    : parts_(parts),
      options_(options),
      generator_({parts.engine, &parts.codec, &parts.reward, &parts.gate}, std::move(next_task),
                 options.generation) {
  for (int64_t i = 0; i < options.reward_threads; ++i) threads_.emplace_back([this] { run_rewards(); });
  if (options.own_thread) threads_.emplace_back([this] { run_engine(); });
}

RolloutWorker::~RolloutWorker() {
  {
    const Lock lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void RolloutWorker::fail(std::exception_ptr error) {
  {
    const Lock lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  changed_.notify_all();
}

void RolloutWorker::rethrow(const Lock& lock) const {
  BOUGH_CHECK(lock.owns_lock(), "the error is read without the lock");
  if (error_) std::rethrow_exception(error_);
}

// `now`: the weights are wanted whatever is running.
void RolloutWorker::take_weights(bool now) {
  const bool may_interrupt = now || options_.interruptible || generator_.idle();
  if (!may_interrupt) return;
  const std::optional<WeightUpdate> update = parts_.weights.take();
  if (!update) return;
  const int64_t interrupted = generator_.samples_in_flight();
  parts_.engine.update_weights(*update);
  parts_.gate.set_version(update->version);
  const Lock lock(mutex_);
  has_weights_ = true;
  ++statistics_.publications;
  statistics_.interrupted_samples += interrupted;
}

// One pass of the engine, with what comes before and after it. False: there was nothing to do.
bool RolloutWorker::pump() {
  take_weights(/*now=*/false);
  {
    const Lock lock(mutex_);
    if (!has_weights_) return false;
  }
  generator_.set_admitting(options_.interruptible || !parts_.weights.has_new());
  std::vector<FinishedGroup> groups = generator_.step();
  {
    const Lock lock(mutex_);
    statistics_.engine = parts_.engine.statistics();
    for (FinishedGroup& group : groups) unscored_.push_back(std::move(group));
    statistics_.num_awaiting_reward += static_cast<int64_t>(groups.size());
  }
  if (groups.empty()) return !generator_.idle();
  changed_.notify_all();
  return true;
}

void RolloutWorker::run_engine() {
  try {
    if (options_.on_thread_start) options_.on_thread_start();
    while (true) {
      {
        Lock lock(mutex_);
        if (wants_suspension_) {
          is_suspended_ = true;
          changed_.notify_all();
          changed_.wait(lock, [&] { return !wants_suspension_ || is_ending_; });
          is_suspended_ = false;
        }
        if (is_ending_) return;
      }
      if (pump()) continue;
      const Clock::Time begin = parts_.clock.now();
      Lock lock(mutex_);
      changed_.wait_for(lock, kPoll, [&] { return is_ending_ || wants_suspension_ || wakes_engine_; });
      wakes_engine_ = false;
      statistics_.idle_seconds += std::chrono::duration<double>(parts_.clock.now() - begin).count();
    }
  } catch (...) {
    fail(std::current_exception());
    Lock lock(mutex_);
    is_suspended_ = true;  // it will never compute again: nobody need wait for it
    changed_.notify_all();
  }
}

// Under the lock. Failed rewards are nobody's zeros: what is left of the group is trained on, or nothing.
void RolloutWorker::keep_or_drop(FinishedGroup group) {
  int64_t num_valid = 0;
  for (const Trajectory& sample : group.samples) {
    num_valid += sample.valid;
    statistics_.reward_failures += sample.reward_failure.has_value();
    consecutive_failures_ = sample.reward_failure ? consecutive_failures_ + 1 : 0;
    if (consecutive_failures_ < options_.max_consecutive_failures || error_) continue;
    error_ = std::make_exception_ptr(IoError(
        str("the last ", consecutive_failures_,
            " rewards all failed, the last one with: ", quoted(*sample.reward_failure, 300),
            "; nothing can be learned from them. Mend the reward function (setting reward), or raise "
            "reward_service.max_consecutive_failures; the same command goes on from the last checkpoint")));
  }
  if (num_valid >= std::min<int64_t>(options_.min_group, static_cast<int64_t>(group.samples.size())))
    return parts_.buffer.put(std::move(group));
  parts_.gate.drop_accepted();
  ++statistics_.dropped_groups;
  dropped_.push_back(group.id);
  wakes_engine_ = true;  // another group may begin
}

void RolloutWorker::run_rewards() {
  while (true) {
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return is_ending_ || !unscored_.empty(); });
    if (is_ending_) return;
    FinishedGroup group = std::move(unscored_.front());
    unscored_.pop_front();
    ++num_being_scored_;
    lock.unlock();
    std::exception_ptr error;
    try {
      generator_.score({&group, 1});
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (!error) keep_or_drop(std::move(group));
    else if (!error_) error_ = error;
    --num_being_scored_;
    --statistics_.num_awaiting_reward;
    lock.unlock();
    changed_.notify_all();
  }
}

RolloutWorker::Waited RolloutWorker::wait_for(int64_t count, const std::function<bool()>& stop,
                                              const std::function<void(int64_t done)>& on_progress) {
  Waited waited{.generated_until = parts_.clock.now()};
  int64_t shown = -1;
  bool lacks_samples = false;
  while (true) {
    int64_t done = 0;
    bool has_samples = false;
    {
      const Lock lock(mutex_);
      rethrow(lock);
      done = parts_.buffer.size();
      has_samples = statistics_.num_awaiting_reward + done >= count;
    }
    if (std::exchange(lacks_samples, !has_samples)) waited.generated_until = parts_.clock.now();
    if (on_progress && std::exchange(shown, done) != done) on_progress(done);
    if (done >= count) {
      waited.enough = true;
      return waited;
    }
    if (stop && stop()) return waited;
    if (!options_.own_thread && !has_samples && pump()) continue;
    Lock lock(mutex_);
    if (!options_.own_thread)
      BOUGH_CHECK(statistics_.num_awaiting_reward > 0 || parts_.buffer.size() >= count || error_ ||
                      std::exchange(wakes_engine_, false),
                  parts_.buffer.size(), " of ", count, " groups, and no more may begin");
    changed_.wait_for(lock, kPoll, [&] {
      const bool has_enough = parts_.buffer.size() >= count;
      return error_ || has_enough || (!options_.own_thread && statistics_.num_awaiting_reward == 0);
    });
  }
}

void RolloutWorker::weights_published() {
  if (!options_.own_thread) return take_weights(/*now=*/true);
  {
    const Lock lock(mutex_);
    wakes_engine_ = true;
  }
  changed_.notify_all();
}

void RolloutWorker::while_suspended(const std::function<void()>& work) {
  if (options_.own_thread) {
    Lock lock(mutex_);
    rethrow(lock);
    wants_suspension_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return is_suspended_; });
  }
  const auto go_on = [&] {
    const Lock lock(mutex_);
    statistics_.engine = parts_.engine.statistics();
    wants_suspension_ = false;
    changed_.notify_all();
  };
  try {
    {
      const Lock lock(mutex_);
      rethrow(lock);
    }
    take_weights(/*now=*/true);
    parts_.engine.park();
    try {
      work();
    } catch (...) {
      parts_.engine.unpark();
      throw;
    }
    parts_.engine.unpark();
  } catch (...) {
    go_on();
    throw;
  }
  go_on();
}

void RolloutWorker::abandon() {
  BOUGH_CHECK(!options_.own_thread, "what a thread of its own generates is not abandoned");
  generator_.abandon();
  Lock lock(mutex_);
  const auto num_unscored = static_cast<int64_t>(std::exchange(unscored_, {}).size());
  statistics_.num_awaiting_reward -= num_unscored;
  parts_.gate.drop_accepted(num_unscored);
  changed_.wait(lock, [&] { return num_being_scored_ == 0; });
}

std::vector<uint64_t> RolloutWorker::take_dropped() {
  const Lock lock(mutex_);
  return std::exchange(dropped_, {});
}

RolloutWorker::Statistics RolloutWorker::statistics() const {
  const Lock lock(mutex_);
  return statistics_;
}

void RolloutWorker::check_integrity() const {
  generator_.check_integrity();
  parts_.gate.check_integrity();
  parts_.buffer.check_integrity();
  const Lock lock(mutex_);
  BOUGH_CHECK(statistics_.num_awaiting_reward == static_cast<int64_t>(unscored_.size()) + num_being_scored_,
              statistics_.num_awaiting_reward, " groups await rewards, ", unscored_.size(), " wait and ",
              num_being_scored_, " are being scored");
}

}  // namespace bough

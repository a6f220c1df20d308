// A clock that is passed as an argument. Tests pass a FakeClock, so waits and time limits take no real time.
#pragma once

#include <chrono>
#include <cstdint>

#include "base/mutex.h"

namespace bough {

class Clock {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;

  virtual ~Clock() = default;
  virtual Time now() const = 0;
  virtual void sleep_until(Time time) = 0;
  void sleep_for(Duration duration) { sleep_until(now() + duration); }
};

class SteadyClock final : public Clock {
 public:
  Time now() const override { return std::chrono::steady_clock::now(); }
  void sleep_until(Time time) override;
};

// Stands still until it is advanced. Starts at the epoch of steady_clock.
class FakeClock final : public Clock {
 public:
  enum class Sleep {
    kAdvances,  // sleep_until advances the clock itself: for tests with one thread
    kWaits,     // sleep_until blocks until another thread has called advance
  };
  explicit FakeClock(Sleep sleep = Sleep::kAdvances) : sleep_(sleep) {}

  Time now() const override;
  void sleep_until(Time time) override;
  void advance(Duration duration);
  int num_sleeping() const;  // threads inside sleep_until

 private:
  const Sleep sleep_;
  mutable Mutex mutex_;
  CondVar advanced_;
  Time now_ GUARDED_BY(mutex_){};
  int num_sleeping_ GUARDED_BY(mutex_) = 0;
};

double seconds_between(Clock::Time begin, Clock::Time end);
// Seconds since `start` on the steady clock.
double seconds_since(Clock::Time start);
// Seconds since 1970 on the system's clock; now_seconds() are whole ones.
double seconds_since_1970();
int64_t now_seconds();

}  // namespace bough

#include "base/clock.h"

#include <thread>

namespace bough {

void SteadyClock::sleep_until(Time time) {
  std::this_thread::sleep_until(time);
}

Clock::Time FakeClock::now() const {
  const MutexLock lock(mutex_);
  return now_;
}

void FakeClock::sleep_until(Time time) {
  MutexLock lock(mutex_);
  if (sleep_ == Sleep::kAdvances) {
    if (time > now_) now_ = time;
    return;
  }
  ++num_sleeping_;
  while (now_ < time) advanced_.wait(mutex_);
  --num_sleeping_;
}

void FakeClock::advance(Duration duration) {
  {
    const MutexLock lock(mutex_);
    now_ += duration;
  }
  advanced_.notify_all();
}

int FakeClock::num_sleeping() const {
  const MutexLock lock(mutex_);
  return num_sleeping_;
}

double seconds_between(Clock::Time begin, Clock::Time end) {
  return std::chrono::duration<double>(end - begin).count();
}

double seconds_since(Clock::Time start) {
  return seconds_between(start, std::chrono::steady_clock::now());
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

int64_t now_seconds() {
  return static_cast<int64_t>(seconds_since_1970());
}

}  // namespace bough

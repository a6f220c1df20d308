// Mutex, MutexLock and CondVar: std::mutex and std::condition_variable with annotations that clang checks.
//
//   class Counter {
//    public:
//     void add(int n) {
//       const MutexLock lock(mutex_);
//       add_locked(n);
//     }
//
//    private:
//     void add_locked(int n) REQUIRES(mutex_) { total_ += n; }  // the caller holds mutex_
//     Mutex mutex_;
//     int total_ GUARDED_BY(mutex_) = 0;  // read and written only by a thread that holds mutex_
//   };
//
// scripts/check_locks runs the check with clang; with other compilers the annotations have no effect. The
// check does not look into lambdas. Therefore wait with a while loop around CondVar::wait, not with a
// predicate.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#ifdef __clang__
#define BOUGH_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define BOUGH_THREAD_ATTRIBUTE(x)
#endif

#define CAPABILITY(name) BOUGH_THREAD_ATTRIBUTE(capability(name))
#define SCOPED_CAPABILITY BOUGH_THREAD_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(mutex) BOUGH_THREAD_ATTRIBUTE(guarded_by(mutex))
// REQUIRES: the caller holds the mutex. EXCLUDES: the caller does not hold it.
#define REQUIRES(...) BOUGH_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) BOUGH_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
// The function locks or unlocks the mutex.
#define ACQUIRE(...) BOUGH_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) BOUGH_THREAD_ATTRIBUTE(try_acquire_capability(__VA_ARGS__))
#define RELEASE(...) BOUGH_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))

namespace bough {

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds the mutex from its construction to its destruction, except between unlock() and lock().
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  // Takes over a mutex that this thread has locked.
  MutexLock(Mutex& mutex, std::adopt_lock_t) REQUIRES(mutex) : mutex_(mutex) {}
  ~MutexLock() RELEASE() {
    if (is_locked_) mutex_.unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void lock() ACQUIRE() {
    mutex_.lock();
    is_locked_ = true;
  }
  void unlock() RELEASE() {
    is_locked_ = false;
    mutex_.unlock();
  }

 private:
  Mutex& mutex_;
  bool is_locked_ = true;
};

// wait() unlocks the mutex while it waits, then locks it again. It may return without a notification.
class CondVar {
 public:
  void wait(Mutex& mutex) REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    changed_.wait(lock);
    lock.release();
  }
  // Returns false if `time` has passed.
  bool wait_until(Mutex& mutex, std::chrono::steady_clock::time_point time) REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const bool in_time = changed_.wait_until(lock, time) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }
  void notify_one() { changed_.notify_one(); }
  void notify_all() { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace bough

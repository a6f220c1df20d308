// Linked into each program on the emulated device: functions of the C library that order threads. They tell
// the device (host_order.h) which thread knows what another thread has waited for.
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include <atomic>

#include "host_threads.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

std::atomic<const bough::emulation::ThreadOrder*> bough_emulation_thread_order;
EXPORTED __attribute__((weak)) int __interceptor_pthread_join(pthread_t thread, void** result);

namespace {

const bough::emulation::ThreadOrder kNone{[](const void*) {}, [](const void*) {}, [] {}};

const bough::emulation::ThreadOrder& order() {
  const auto* const found = bough_emulation_thread_order.load(std::memory_order_acquire);
  return found ? *found : kNone;
}

// The C library's function. Without a lock, because this code runs within pthread_mutex_lock.
template <class Function>
class Next {
 public:
  // version: of functions that have an older one for programs of long ago
  constexpr explicit Next(const char* name, const char* version = nullptr) : name_(name), version_(version) {}
  Function* get() {
    if (!function_)
      function_ = reinterpret_cast<Function*>(version_ ? dlvsym(RTLD_NEXT, name_, version_)
                                                       : dlsym(RTLD_NEXT, name_));
    return function_;
  }

 private:
  const char *name_, *version_;
  std::atomic<Function*> function_ = nullptr;
};

constinit Next<int(pthread_mutex_t*)> lock_mutex("pthread_mutex_lock"), try_mutex("pthread_mutex_trylock"),
    unlock_mutex("pthread_mutex_unlock");
constinit Next<int(pthread_cond_t*, pthread_mutex_t*)> wait_condition("pthread_cond_wait", "GLIBC_2.3.2");
constinit Next<int(pthread_cond_t*, pthread_mutex_t*, const timespec*)> wait_until(
    "pthread_cond_timedwait", "GLIBC_2.3.2");
constinit Next<int(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*)> wait_until_clock(
    "pthread_cond_clockwait");
constinit Next<int(pthread_t, void**)> join_thread("pthread_join");

}  // namespace

EXPORTED int pthread_mutex_lock(pthread_mutex_t* mutex) {
  const int error = lock_mutex.get()(mutex);
  if (error == 0) order().acquires(mutex);
  return error;
}

EXPORTED int pthread_mutex_trylock(pthread_mutex_t* mutex) {
  const int error = try_mutex.get()(mutex);
  if (error == 0) order().acquires(mutex);
  return error;
}

EXPORTED int pthread_mutex_unlock(pthread_mutex_t* mutex) {
  order().releases(mutex);
  return unlock_mutex.get()(mutex);
}

EXPORTED int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  order().releases(mutex);
  const int error = wait_condition.get()(condition, mutex);
  order().acquires(mutex);
  return error;
}

EXPORTED int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until) {
  order().releases(mutex);
  const int error = wait_until.get()(condition, mutex, until);
  order().acquires(mutex);
  return error;
}

EXPORTED int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                    const timespec* until) {
  order().releases(mutex);
  const int error = wait_until_clock.get()(condition, mutex, clock, until);
  order().acquires(mutex);
  return error;
}

EXPORTED int pthread_join(pthread_t thread, void** result) {
  const int error = __interceptor_pthread_join ? __interceptor_pthread_join(thread, result)
                                               : join_thread.get()(thread, result);
  if (error == 0) order().joined();
  return error;
}

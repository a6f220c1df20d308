// A lock for the emulated device's own data. The order of threads follows from the mutexes of the program
// (host_threads.cpp); a mutex of the device would order them, too.
#pragma once

#include <sched.h>

#include <atomic>

namespace bough::emulation {

class Lock {
 public:
  void lock() {
    while (is_held_.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  void unlock() { is_held_.clear(std::memory_order_release); }

 private:
  std::atomic_flag is_held_ = ATOMIC_FLAG_INIT;
};

}  // namespace bough::emulation

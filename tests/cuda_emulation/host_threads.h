// How the program's threads tell the emulated device about their order (host_threads.cpp, host_order.cpp).
#pragma once

#include <atomic>

namespace bough::emulation {

struct ThreadOrder {
  void (*releases)(const void* mutex);  // before the thread gives the mutex back
  void (*acquires)(const void* mutex);  // after the thread has got it
  void (*joined)();                     // after another thread has ended
};

}  // namespace bough::emulation

// Defined by the program. The emulated library sets it when it is opened.
extern "C" std::atomic<const bough::emulation::ThreadOrder*> bough_emulation_thread_order;

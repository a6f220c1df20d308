#include "base/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace bough {

void parallel_for(size_t count, const std::function<void(size_t)>& work) {
  std::atomic<size_t> next = 0, end = count;
  Mutex mutex;
  std::exception_ptr error;
  const auto loop = [&] {
    for (size_t i; (i = next++) < end;) {
      try {
        work(i);
      } catch (...) {
        const MutexLock lock(mutex);
        if (i < end) {  // indices are handed out in order, so every lower one is done or running
          end = i;
          error = std::current_exception();
        }
      }
    }
  };
  const size_t threads = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 16);
  {
    std::vector<std::jthread> others;
    for (size_t i = 1; i < std::min(threads, count); ++i) others.emplace_back(loop);
    loop();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace bough

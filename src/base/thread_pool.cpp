#include "base/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include "base/error.h"

namespace bough {

ThreadPool::ThreadPool(int num_threads) {
  BOUGH_CHECK(num_threads >= 1, "num_threads=", num_threads);
  threads_.reserve(static_cast<size_t>(num_threads));
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::push(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push(std::move(task));
  }
  wake_.notify_one();
}

void ThreadPool::work() {
  while (true) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop();
    }
    task();
  }
}

namespace {
// One parallel_for: the caller and its helpers take indices from `next` until none is left. Shared by all of
// them, because a helper may begin only after the caller, having done everything itself, has returned.
struct Loop {
  Loop(int64_t begin, int64_t end, const std::function<void(int64_t)>& body)
      : next(begin), end(end), body(body) {}

  void run() {
    int64_t finished = 0;
    for (int64_t i; (i = next.fetch_add(1)) < end; ++finished) {
      if (failed) continue;  // counted, not run
      try {
        body(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
        failed = true;
      }
    }
    const std::lock_guard lock(mutex);
    num_finished += finished;
    if (finished > 0) done.notify_all();
  }

  std::atomic<int64_t> next;
  const int64_t end;
  const std::function<void(int64_t)>& body;  // the caller's; used only while indices are left
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::condition_variable done;
  int64_t num_finished = 0;
  std::exception_ptr error;
};
}  // namespace

void ThreadPool::parallel_for(int64_t begin, int64_t end, const std::function<void(int64_t)>& body) {
  if (begin >= end) return;
  auto loop = std::make_shared<Loop>(begin, end, body);
  const int64_t num_helpers = std::min<int64_t>(num_threads(), end - begin - 1);
  for (int64_t i = 0; i < num_helpers; ++i) push([loop] { loop->run(); });
  loop->run();
  std::unique_lock lock(loop->mutex);
  loop->done.wait(lock, [&] { return loop->num_finished == end - begin; });
  // Taken out, or a helper that drops the loop later would destroy the exception while the caller reads it.
  if (const std::exception_ptr error = std::exchange(loop->error, nullptr)) std::rethrow_exception(error);
}

}  // namespace bough

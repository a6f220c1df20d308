// A fixed set of threads that run what is submitted, oldest first.
//
// One mutex guards the queue; workers wait on one condition variable that submit() and the destructor signal.
// The destructor runs what is still queued, then joins: a future from submit() never breaks its promise.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <queue>
#include <thread>
#include <type_traits>
#include <vector>

namespace bough {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // at least 1
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()); }

  // Runs `work()` on one of the threads; the future carries its result or its exception.
  template <class Work>
  auto submit(Work work) -> std::future<std::invoke_result_t<Work>> {
    using Result = std::invoke_result_t<Work>;
    auto task = std::make_shared<std::packaged_task<Result()>>(std::move(work));
    auto future = task->get_future();
    push([task] { (*task)(); });
    return future;
  }

  // Calls body(i) for begin <= i < end, on the pool and on the calling thread, and returns when all are done.
  // The first exception is thrown again after that; indices not begun by then are left out. May be called
  // from inside a task: the caller works through the indices itself when no thread is free.
  void parallel_for(int64_t begin, int64_t end, const std::function<void(int64_t)>& body);

 private:
  void push(std::function<void()> task);
  void work();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::queue<std::function<void()>> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace bough

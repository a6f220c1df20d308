// A CUDA graph of the emulated device: the work of a thread between the begin and the end of a capture. Ops
// and launches run during the capture, because their results give the shapes of later ops. When the capture
// ends, memory that existed before has its old bytes again. A replay runs the same work on the same memory.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "host_order.h"

namespace bough::emulation {

class Recording {
 public:
  Recording() = default;
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // Records the calling thread's work from begin() to end(). Both throw std::runtime_error if they are called
  // out of turn.
  void begin();
  void end();
  bool is_active() const { return is_active_; }

  // Notes what the next work accesses, and keeps the bytes that it overwrites.
  void add_accesses(const std::vector<Access>& accesses);
  void add(std::function<void()> work) { work_.push_back(std::move(work)); }

  // Ends the process if memory that the graph uses has been freed.
  void replay(int stream) const;

 private:
  struct Used {
    Access access;
    uint64_t allocation;
  };
  struct Saved {
    char* begin;
    std::vector<char> bytes;
  };
  bool is_saved(const Access& access) const;
  void restore();

  bool is_active_ = false;
  std::vector<std::function<void()>> work_;
  std::vector<Used> used_;
  std::vector<Saved> saved_;
};

// The recording of this thread's work, or nullptr.
Recording*& recording();

// Queues work: runs it, and adds it to the recording, if there is one.
void run_and_record(const std::function<void()>& work);
// Throws std::runtime_error if the thread's work is being recorded: `what` would wait for the device.
void refuse_in_capture(const char* what);

}  // namespace bough::emulation

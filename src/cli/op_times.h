// Where the time of a piece of code goes, by torch op.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <string>

namespace bough {

// While it lives, counts the seconds of every op of a device, not those that ops call themselves. On the CPU
// those of this thread, in which autograd's backward runs, too; on a GPU those of the process, since backward
// has a thread of its own there, each waited for: the whole then takes longer than without. One at a time.
class OpTimes {
 public:
  explicit OpTimes(c10::Device device);
  ~OpTimes();
  OpTimes(const OpTimes&) = delete;
  OpTimes& operator=(const OpTimes&) = delete;

  const std::map<std::string, double>& seconds() const {
    return seconds_;
  }  // "bough::swiglu_forward" -> seconds

 private:
  std::map<std::string, double> seconds_;
  uint64_t handle_;
};

}  // namespace bough

// Measures the time of a piece of code by torch op.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <string>

namespace bough {

// Measures the ops of a device while this object lives. An op that another op calls counts for its caller.
//   CPU: ops of the constructing thread, which also runs autograd's backward.
//   GPU: ops of all threads, because backward has its own thread there. The GPU is synchronized before and
//        after each op, so the measured code runs slower.
// A second object at the same time throws InternalError.
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

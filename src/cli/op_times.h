// Where the time of a piece of code goes, by torch op.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace bough {

// While it lives, counts the seconds of every op that this thread calls, not those that ops call themselves.
// On the CPU autograd's backward runs in the calling thread, too.
class OpTimes {
 public:
  OpTimes();
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

// Turns SIGINT (Ctrl-C), SIGTERM and SIGUSR1 into a flag that training loops check between training steps.
#pragma once

#include <csignal>

namespace bough {

// While an object of this type lives, the first SIGINT, SIGTERM or SIGUSR1 only sets a flag, so that a
// checkpoint can be written. A SIGINT after the first signal ends the process at once with exit code 130. The
// destructor restores the former signal handlers. Only one object may exist: constructing a second one throws
// InternalError. mpirun forwards SIGUSR1 to its processes, and batch systems send it before the time limit.
class StopFlag {
 public:
  StopFlag();
  ~StopFlag();
  StopFlag(const StopFlag&) = delete;
  StopFlag& operator=(const StopFlag&) = delete;

  bool requested() const;
  int signal_number() const;        // SIGINT, SIGTERM, SIGUSR1, or 0
  void throw_if_requested() const;  // throws Interrupted

 private:
  struct sigaction old_interrupt_;
  struct sigaction old_terminate_;
  struct sigaction old_user_;
};

}  // namespace bough

// Ctrl-C, SIGTERM and SIGUSR1 as a flag that loops look at between steps.
#pragma once

#include <csignal>

namespace bough {

// While an object of this type lives, the first SIGINT, SIGTERM or SIGUSR1 only sets a flag, so that a
// checkpoint can be written; a second SIGINT ends the process at once with exit code 130. The destructor puts
// the former handlers back. One at a time: a second object is an InternalError. SIGUSR1 is what mpirun hands
// on to its processes and what batch systems send before the time is up.
class StopFlag {
 public:
  StopFlag();
  ~StopFlag();
  StopFlag(const StopFlag&) = delete;
  StopFlag& operator=(const StopFlag&) = delete;

  bool requested() const;
  int signal_number() const;        // SIGINT, SIGTERM, SIGUSR1, or 0
  void throw_if_requested() const;  // Interrupted

 private:
  struct sigaction old_interrupt_;
  struct sigaction old_terminate_;
  struct sigaction old_user_;
};

}  // namespace bough

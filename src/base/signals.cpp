#include "base/signals.h"

#include <unistd.h>

#include <atomic>

#include "base/error.h"

namespace bough {
namespace {
// A signal handler gets only the signal's number as its argument, so this state cannot be a member.
std::atomic<int> received{0};
std::atomic<bool> installed{false};
static_assert(std::atomic<int>::is_always_lock_free, "the handler may only use lock-free state");

void handle(int signal_number) {
  const int before = received.exchange(signal_number);
  // The user does not want to wait for the checkpoint: a second Ctrl-C, or a Ctrl-C after another signal.
  if (before != 0 && signal_number == SIGINT) ::_exit(130);
}
}  // namespace

StopFlag::StopFlag() {
  BOUGH_CHECK(!installed.exchange(true), "only one StopFlag may exist at a time");
  received = 0;
  struct sigaction action = {};
  action.sa_handler = handle;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;  // a write to a checkpoint continues instead of failing with EINTR
  ::sigaction(SIGINT, &action, &old_interrupt_);
  ::sigaction(SIGTERM, &action, &old_terminate_);
  ::sigaction(SIGUSR1, &action, &old_user_);
}

StopFlag::~StopFlag() {
  ::sigaction(SIGINT, &old_interrupt_, nullptr);
  ::sigaction(SIGTERM, &old_terminate_, nullptr);
  ::sigaction(SIGUSR1, &old_user_, nullptr);
  installed = false;
}

bool StopFlag::requested() const {
  return received != 0;
}

int StopFlag::signal_number() const {
  return received;
}

void StopFlag::throw_if_requested() const {
  if (requested())
    throw Interrupted(received == SIGTERM   ? "stopped by SIGTERM"
                      : received == SIGUSR1 ? "stopped by SIGUSR1"
                                            : "stopped by Ctrl-C");
}

}  // namespace bough

#include "cli/op_times.h"

#include <ATen/record_function.h>

#include <chrono>
#include <string_view>

#include "base/error.h"

namespace bough {

namespace {
using Time = std::chrono::steady_clock::time_point;

// torch's callbacks are plain functions: what they add to is the thread's present OpTimes.
thread_local std::map<std::string, double>* current = nullptr;
thread_local int depth = 0;

struct Call : at::ObserverContext {
  Time start = std::chrono::steady_clock::now();
};

// Autograd's own entries around the ops of a backward node are no ops.
std::unique_ptr<at::ObserverContext> begin_op(const at::RecordFunction& function) {
  if (std::string_view(function.name()).starts_with("autograd::")) return nullptr;
  ++depth;
  return std::make_unique<Call>();
}

void end_op(const at::RecordFunction& function, at::ObserverContext* context) {
  if (!context || --depth > 0 || !current) return;
  const auto taken = std::chrono::steady_clock::now() - static_cast<Call*>(context)->start;
  (*current)[function.name()] += std::chrono::duration<double>(taken).count();
}
}  // namespace

OpTimes::OpTimes() {
  BOUGH_CHECK(!current, "op times are already taken in this thread");
  current = &seconds_;
  depth = 0;
  handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(begin_op, end_op).scopes({at::RecordScope::FUNCTION}));
}

OpTimes::~OpTimes() {
  at::removeCallback(handle_);
  current = nullptr;
}

}  // namespace bough

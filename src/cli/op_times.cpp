#include "cli/op_times.h"

#include <ATen/record_function.h>

#include <chrono>
#include <string_view>

#include "base/error.h"
#include "base/mutex.h"
#include "kernels/common/device.h"

namespace bough {

namespace {
using Time = std::chrono::steady_clock::time_point;

// torch's callbacks are plain functions without state. They add to the map of the OpTimes that exists now, to
// which `seconds` points. nullptr if there is none.
struct Present {
  Mutex mutex;  // a GPU's ops are called from several threads
  std::map<std::string, double>* seconds GUARDED_BY(mutex) = nullptr;
  c10::Device device{c10::kCPU};  // changes only while no callback is installed
};
Present present;
thread_local int depth = 0;

struct Call : at::ObserverContext {
  Time start = std::chrono::steady_clock::now();
};

// Autograd's own events, which enclose the ops of a backward node, do not count as ops.
std::unique_ptr<at::ObserverContext> begin_op(const at::RecordFunction& function) {
  if (std::string_view(function.name()).starts_with("autograd::")) return nullptr;
  if (depth++ == 0) synchronize(present.device);
  return std::make_unique<Call>();
}

void end_op(const at::RecordFunction& function, at::ObserverContext* context) {
  if (!context || --depth > 0) return;
  synchronize(present.device);
  const auto taken = std::chrono::steady_clock::now() - static_cast<Call*>(context)->start;
  const MutexLock lock(present.mutex);
  if (present.seconds) (*present.seconds)[function.name()] += std::chrono::duration<double>(taken).count();
}
}  // namespace

OpTimes::OpTimes(c10::Device device) {
  {
    const MutexLock lock(present.mutex);
    BOUGH_CHECK(!present.seconds, "op times are already being measured");
    present.seconds = &seconds_;
  }
  present.device = device;
  depth = 0;
  const auto callback = at::RecordFunctionCallback(begin_op, end_op).scopes({at::RecordScope::FUNCTION});
  handle_ = device.is_cpu() ? at::addThreadLocalCallback(callback) : at::addGlobalCallback(callback);
}

OpTimes::~OpTimes() {
  at::removeCallback(handle_);
  const MutexLock lock(present.mutex);
  present.seconds = nullptr;
  present.device = c10::kCPU;
}

}  // namespace bough

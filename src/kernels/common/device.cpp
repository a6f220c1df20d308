#include "kernels/common/device.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <sys/resource.h>

#include "base/error.h"
#include "base/memory.h"
#include "kernels/common/cpu_allocator.h"

namespace bough {

namespace {

// Returns the current device if `device` has no index.
c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index()
                            : c10::impl::getDeviceGuardImpl(device.type())->getDevice().index();
}

// CUDA's allocator refuses questions until CUDA is initialised. The first tensor on the device does that.
c10::DeviceAllocator& allocator_of(c10::Device device) {
  at::globalContext().lazyInitDevice(device.type());
  return *c10::getDeviceAllocator(device.type());
}

c10::CachingDeviceAllocator::DeviceStats statistics(c10::Device device) {
  return allocator_of(device).getDeviceStats(index_of(device));
}

// Functions of cuda_graph_cuda_ops.cpp. RTLD_DEFAULT finds them, because the library was opened with
// RTLD_GLOBAL. what: the property that the function reads.
template <class Function>
Function* cuda_function(const char* name, const char* what, c10::Device device) {
  auto* const function = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  BOUGH_CHECK(function, "cannot read the ", what, " of ", device.str(), ": the CUDA library is not open");
  return function;
}

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

}  // namespace

void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(index_of(device));
}

void synchronize_stream(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

int64_t peak_memory_bytes(c10::Device device) {
  if (!device.is_cpu()) return statistics(device).allocated_bytes[kAll].peak;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;  // Linux counts in KiB
}

DeviceMemory device_memory(c10::Device device) {
  if (device.is_cpu()) {
    const HostMemory host = host_memory();
    return {host.available, host.limit};
  }
  const auto [free, total] = allocator_of(device).getMemoryInfo(index_of(device));
  const auto kept = statistics(device);
  return {static_cast<int64_t>(free) + kept.reserved_bytes[kAll].current - kept.allocated_bytes[kAll].current,
          static_cast<int64_t>(total)};
}

PeakBytes::PeakBytes(c10::Device device) : device_(device) {
  if (device_.is_cpu()) {
    before_ = cpu_allocated_bytes();
    reset_cpu_peak_bytes();
  } else {
    before_ = statistics(device_).allocated_bytes[kAll].current;
    allocator_of(device_).resetPeakStats(index_of(device_));
  }
}

int64_t PeakBytes::bytes() const {
  return (device_.is_cpu() ? cpu_peak_bytes() : statistics(device_).allocated_bytes[kAll].peak) - before_;
}

std::string device_name(c10::Device device) {
  if (device.is_cpu()) return "cpu";
  char text[256] = {};
  cuda_function<void(int, char*, size_t)>("bough_cuda_device_name", "name", device)(index_of(device), text,
                                                                                    sizeof text);
  return text;
}

int compute_capability(c10::Device device) {
  if (device.is_cpu()) return 0;
  return cuda_function<int(int)>("bough_cuda_capability", "compute capability", device)(index_of(device));
}

}  // namespace bough

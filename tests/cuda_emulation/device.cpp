// A stand-in for libtorch_cuda: one device of type CUDA whose memory is the host's. Our CUDA kernels find
// their ops' tensors on device "cuda". Every other op runs its CPU kernel on the same memory.
//
// Work runs at once, so streams and events have nothing to order.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "memory.h"

namespace bough::emulation {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::CUDA;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);
constexpr size_t kTotalBytes = size_t{80} << 30;

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = allocate_device_memory(bytes);
    const std::lock_guard lock(mutex_);
    sizes_[data] = bytes;
    stats_.allocated_bytes[0].increase(bytes);
    stats_.reserved_bytes[0].increase(bytes);
    return {data, data, &free, c10::Device(kType, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& /*ptr*/, c10::Stream /*stream*/) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {
    const std::lock_guard lock(mutex_);
    stats_.allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex /*device*/) override {
    const std::lock_guard lock(mutex_);
    stats_.allocated_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex /*device*/) override {
    const std::lock_guard lock(mutex_);
    return {kTotalBytes - static_cast<size_t>(stats_.reserved_bytes[0].current), kTotalBytes};
  }

 private:
  static void free(void* data);
  void release(void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = sizes_.find(data);
    stats_.allocated_bytes[0].decrease(found->second);
    stats_.reserved_bytes[0].decrease(found->second);
    sizes_.erase(found);
    free_device_memory(data);
  }

  std::mutex mutex_;
  std::map<void*, size_t> sizes_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

// Never destroyed: tensors in static variables may outlive this file's variables.
DeviceAllocator& allocator() {
  static auto* const instance = new DeviceAllocator;
  return *instance;
}
void DeviceAllocator::free(void* data) {
  if (data) allocator().release(data);
}
REGISTER_ALLOCATOR(kType, &allocator())

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device() { return {kType, 0}; }
  static c10::Stream& current() {
    thread_local c10::Stream stream(c10::Stream::DEFAULT, device());
    return stream;
  }

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device /*to*/) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device /*to*/) const override {}
  void uncheckedSetDevice(c10::Device /*to*/) const noexcept override {}
  c10::Stream getStream(c10::Device /*of*/) const override { return current(); }
  c10::Stream getDefaultStream(c10::Device /*of*/) const override {
    return c10::Stream(c10::Stream::DEFAULT, device());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool /*high_priority*/) const override {
    return getNewStream(of, 0);
  }
  c10::Stream getNewStream(c10::Device /*of*/, int /*priority*/) const override {
    static std::atomic<c10::StreamId> last{0};
    return c10::Stream(c10::Stream::UNSAFE, device(), ++last);
  }
  c10::Stream exchangeStream(c10::Stream to) const override { return std::exchange(current(), to); }
  void record(void** event, const c10::Stream& /*stream*/, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    if (!*event) *event = new char;
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<char*>(event);
  }
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* /*event*/) const override {}
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Memory of its own, so that isPinnedPtr() can tell it from other memory of the host.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = std::malloc(std::max<size_t>(bytes, 1));
    const std::lock_guard lock(mutex_);
    ends_[data] = static_cast<char*>(data) + std::max<size_t>(bytes, 1);
    return {data, data, &free, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool holds(const void* p) {
    const std::lock_guard lock(mutex_);
    auto after = ends_.upper_bound(p);
    return after != ends_.begin() && p < std::prev(after)->second;
  }

 private:
  static void free(void* data);

  std::mutex mutex_;
  std::map<const void*, const void*> ends_;
};
PinnedAllocator& pinned_allocator() {
  static auto* const instance = new PinnedAllocator;
  return *instance;
}
void PinnedAllocator::free(void* data) {
  const std::lock_guard lock(pinned_allocator().mutex_);
  pinned_allocator().ends_.erase(data);
  std::free(data);
}

// The kernels that tensors on the device need before any CPU kernel can see them: those which make a tensor,
// and those whose result shares the memory of an argument.
at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> type,
                 std::optional<c10::Layout> /*layout*/, std::optional<c10::Device> /*device*/,
                 std::optional<bool> /*pin*/, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &allocator(), kKeys, c10::dtype_or_default(type), format);
}
at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<c10::ScalarType> type, std::optional<c10::Layout> /*layout*/,
                         std::optional<c10::Device> /*device*/, std::optional<bool> /*pin*/) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), kKeys, c10::dtype_or_default(type));
}

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// Returns a CPU tensor over the same memory.
at::Tensor as_cpu(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  const auto& storage = tensor.storage();
  auto shared = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                             c10::DataPtr(storage.mutable_data(), c10::kCPU), c10::GetAllocator(c10::kCPU),
                             /*resizable=*/true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* const impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_neg()) impl->_set_neg(true);
  return result;
}

// Returns a copy on the device of a CPU kernel's result.
at::Tensor to_device(const at::Tensor& tensor) {
  if (!tensor.defined() || on_device(tensor)) return tensor;
  auto result = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, {}, {});
  as_cpu(result).copy_(tensor);
  return result;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool /*non_blocking*/) {
  as_cpu(self).copy_(as_cpu(from));
  return self;
}

// Runs the CPU kernel of an op on the memory of its arguments. A result that is one of the arguments stays
// so; any other result is copied to the device. Refuses ops whose result is a view: they need a kernel
// above.
void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t num_arguments = schema.arguments().size(), first = stack->size() - num_arguments;
  std::vector<std::pair<at::Tensor, at::Tensor>> mapped;  // on the CPU, on the device
  const auto map = [&](const at::Tensor& tensor) {
    auto cpu = as_cpu(tensor);
    if (on_device(tensor)) mapped.emplace_back(cpu, tensor);
    return cpu;
  };
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = (*stack)[first + i];
    const auto* const alias = schema.arguments()[i].alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), "CUDA emulation: ", op.operator_name(),
                " returns a view and has no kernel in tests/cuda_emulation/device.cpp");
    if (value.isTensor()) {
      value = map(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(map(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional(map(*tensor)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      value = c10::Device(c10::kCPU);
    }
  }
  std::vector<const void*> data;
  for (const auto& [cpu, device] : mapped) data.push_back(cpu.storage().data());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t i = 0; i < mapped.size(); ++i) {
    const auto& [cpu, device] = mapped[i];
    if (cpu.storage().data() == data[i] && cpu.sizes() == device.sizes()) continue;
    at::native::resize_(device, cpu.sizes());  // an `out` argument that was empty
    as_cpu(device).copy_(cpu);
  }
  const auto back = [&](const at::Tensor& result) {
    for (const auto& [cpu, device] : mapped)
      if (cpu.is_same(result)) return device;
    return to_device(result);
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(back(tensor));
      value = list;
    }
  }
}

}  // namespace
}  // namespace bough::emulation

// The registry demands this namespace.
namespace at {
struct EmulatedCudaHooks final : CUDAHooksInterface {
  explicit EmulatedCudaHooks(CUDAHooksArgs /*arguments*/) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex /*device*/) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex /*device*/) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex /*device*/) const override { return 0; }
  void deviceSynchronize(DeviceIndex /*device*/) const override {}
  bool isPinnedPtr(const void* data) const override {
    return bough::emulation::pinned_allocator().holds(data);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &bough::emulation::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return &bough::emulation::allocator(); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, EmulatedCudaHooks)
}  // namespace at

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(bough::emulation::empty));
  m.impl("empty_strided", TORCH_FN(bough::emulation::empty_strided));
  m.impl("copy_", TORCH_FN(bough::emulation::copy_));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&bough::emulation::run_on_cpu>());
}

// Found by name by src/kernels/common/device.cpp.
extern "C" void bough_cuda_device_name(int /*device*/, char* name, size_t size) {
  std::snprintf(name, size, "emulated H100");
}

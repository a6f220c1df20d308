// The ops of libtorch on the emulated device. An op runs its CPU kernel on the same memory; tensors that it
// returns are copied to the device. Our CUDA kernels find their ops' tensors on device "cuda".
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device.h"
#include "pinned_memory.h"
#include "recording.h"

namespace bough::emulation {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

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
bool is_pinned(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.numel() > 0 &&
         is_pinned_memory(tensor.storage().data());
}

// Returns a CPU tensor over the same memory, which the tensor does not keep alive.
at::Tensor memory_of(const at::Tensor& tensor) {
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
at::Tensor as_cpu(const at::Tensor& tensor) {
  return on_device(tensor) ? memory_of(tensor) : tensor;
}

// The bytes from the tensor's first element to its last.
Access access(const at::Tensor& tensor, bool is_write) {
  if (tensor.numel() == 0) return {nullptr, 0, is_write};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto element = static_cast<int64_t>(tensor.element_size());
  const auto* const begin =
      static_cast<const char*>(tensor.storage().data()) + tensor.storage_offset() * element;
  return {begin, static_cast<size_t>((last + 1) * element), is_write};
}

// Says what the op that runs next does on the current stream.
void announce(const char* op, const std::vector<Access>& accesses) {
  if (recording()) recording()->add_accesses(accesses);
  stream_works(current_stream(), op, accesses);
}

// Returns a copy on the device of a CPU kernel's result.
at::Tensor to_device(const char* op, const at::Tensor& tensor) {
  if (!tensor.defined() || on_device(tensor)) return tensor;
  auto result = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, {}, {});
  announce(op, {access(result, true)});
  as_cpu(result).copy_(tensor);
  return result;
}

// As cudaMemcpyAsync does: a copy from or to pinned memory that need not be converted runs later, and the
// host goes on. The host waits for any other copy to its memory, and for a copy from it if asked to.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (self.numel() == 0) return self;
  const at::Tensor& host = on_device(self) ? from : self;
  const bool crosses = !on_device(host);
  const bool is_plain = self.scalar_type() == from.scalar_type() && self.is_contiguous() &&
                        from.is_contiguous() && self.sizes() == from.sizes();
  const bool is_async = crosses && non_blocking && is_plain && is_pinned(host);
  const bool waits = crosses && !is_async && (host.is_same(self) || !non_blocking);
  if (crosses && !is_async) refuse_in_capture("a copy between the device and memory that is not pinned");
  std::vector<Access> accesses;
  if (on_device(from) || is_async) accesses.push_back(access(from, false));
  if (on_device(self) || is_async) accesses.push_back(access(self, true));
  announce("copy_", accesses);
  if (waits) host_waits_for_stream(current_stream());
  const auto pinned = access(host, host.is_same(self));
  const at::Tensor to_cpu = is_async ? memory_of(self) : as_cpu(self),
                   from_cpu = is_async ? memory_of(from) : as_cpu(from);
  run_and_record([=] {
    std::optional<StreamsPinnedAccess> opened;
    if (is_async) opened.emplace(pinned.begin, pinned.bytes, pinned.is_write);
    to_cpu.copy_(from_cpu);
  });
  return self;
}

// Calls visit(tensor) for the tensors of the value, in place.
template <class Visit>
void for_each_tensor(c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    value = visit(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(visit(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional(visit(*tensor)) : std::nullopt);
    value = list;
  }
}

// Ops that return numbers, such as item(), wait for the device.
bool returns_numbers(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.type()->kind() != c10::TypeKind::TensorType &&
        result.type()->kind() != c10::TypeKind::ListType)
      return true;
  return false;
}

// A CPU tensor over the memory of a tensor on the device.
struct Mapped {
  at::Tensor cpu, device;
  const void* data;
  bool has_moved() const { return cpu.storage().data() != data || cpu.sizes() != device.sizes(); }
};

// Runs the CPU kernel of an op on the memory of its arguments. A result that is one of the arguments stays
// so; any other result is copied to the device. Refuses ops whose result is a view: they need a kernel
// above.
void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = c10::toString(op.operator_name());
  if (returns_numbers(schema)) refuse_in_capture(name.c_str());
  const size_t num_arguments = schema.arguments().size(), first = stack->size() - num_arguments;
  std::vector<Mapped> mapped;
  std::vector<Access> accesses;
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = (*stack)[first + i];
    const auto* const alias = schema.arguments()[i].alias_info();
    TORCH_CHECK(!alias || alias->isWrite(), "CUDA emulation: ", op.operator_name(),
                " returns a view and has no kernel in tests/cuda_emulation/dispatch.cpp");
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      auto cpu = as_cpu(tensor);
      if (on_device(tensor)) {
        mapped.push_back({cpu, tensor, cpu.storage().data()});
        accesses.push_back(access(tensor, alias != nullptr));
      }
      return cpu;
    });
    if (value.isDevice() && value.toDevice().type() == kType) value = c10::Device(c10::kCPU);
  }
  announce(name.c_str(), accesses);
  const torch::jit::Stack arguments(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (returns_numbers(schema)) host_waits_for_stream(current_stream());

  // Pairs of memory on the device and results of the CPU kernel that are copied there.
  std::vector<std::pair<at::Tensor, at::Tensor>> moved;
  for (const auto& [cpu, device, data] : mapped) {
    if (!Mapped{cpu, device, data}.has_moved()) continue;
    at::native::resize_(device, cpu.sizes());  // an `out` argument that was empty
    announce(name.c_str(), {access(device, true)});
    moved.emplace_back(memory_of(device), cpu);
    moved.back().first.copy_(cpu);
  }
  std::vector<std::pair<size_t, at::Tensor>> results;  // the memory of those that are copied, by their number
  size_t number = 0;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    for_each_tensor((*stack)[i], [&](const at::Tensor& result) {
      ++number;
      for (const Mapped& argument : mapped)
        if (argument.cpu.is_same(result)) return argument.device;
      at::Tensor copied = to_device(name.c_str(), result);
      if (copied.defined()) results.emplace_back(number, memory_of(copied));
      return copied;
    });
  if (!recording()) return;
  recording()->add([op, arguments, moved, results] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    torch::jit::Stack replayed = arguments;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &replayed);
    for (const auto& [to, from] : moved) to.copy_(from);
    size_t at = 0, next = 0;
    for (c10::IValue& value : replayed)
      for_each_tensor(value, [&](const at::Tensor& result) {
        if (++at == (next < results.size() ? results[next].first : 0)) results[next++].second.copy_(result);
        return result;
      });
  });
}

// Announces our own ops, whose kernels do not go through run_on_cpu().
std::unique_ptr<at::ObserverContext> on_op(const at::RecordFunction& function) {
  if (std::string_view(function.name()).rfind("bough::", 0) != 0) return nullptr;
  const auto op = c10::Dispatcher::singleton().findSchema(*function.operator_name());
  const auto& arguments = op->schema().arguments();
  std::vector<Access> accesses;
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue value = function.inputs()[i];
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (on_device(tensor)) accesses.push_back(access(tensor, arguments[i].alias_info() != nullptr));
      return tensor;
    });
  }
  if (!accesses.empty()) announce(function.name(), accesses);
  return nullptr;
}

[[maybe_unused]] const at::CallbackHandle observes = at::addGlobalCallback(
    at::RecordFunctionCallback(on_op).needsInputs(true).scopes({at::RecordScope::FUNCTION}));

}  // namespace
}  // namespace bough::emulation

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
  // Otherwise libtorch's own fallback for all devices would run, which waits for the device.
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&bough::emulation::run_on_cpu>());
  m.impl("record_stream", [](at::Tensor& self, c10::Stream stream) {
    bough::emulation::stream_uses(self.storage().data(), static_cast<int>(stream.id()));
  });
}

// In place of matrix_product_cuda_ops.cpp, which calls cuBLAS: our CPU kernels, which allocate no other memory of
// the device than cuBLAS's results.
TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  for (const char* const name : {"matrix_product", "add_matrix_product_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&bough::emulation::run_on_cpu>());
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&bough::emulation::run_on_cpu>());
}

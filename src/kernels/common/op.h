// Our ops are registered in torch's dispatcher under `bough::`. Python finds them as torch.ops.bough.*, and
// the CUDA library adds its kernels when it is opened. The reference in tensor ops is registered for every
// device. A CPU or CUDA kernel takes precedence over the reference.
//
// An implementation maps a tensor's dtype to an element type with dispatch_float_types.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "base/error.h"
#include "kernels/common/cuda_library.h"
#include "kernels/common/element_types.h"
#include "kernels/common/isa.h"

namespace bough {

template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

template <class T>
using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
const T* data(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <class T>
T* mutable_data(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Calls function.template operator()<T>() with T = float, double or BFloat16Bits.
template <class Function>
void dispatch_float_types(at::ScalarType type, const char* op, Function&& function) {
  switch (type) {
    case at::kFloat: return function.template operator()<float>();
    case at::kDouble: return function.template operator()<double>();
    case at::kBFloat16: return function.template operator()<BFloat16Bits>();
    default: BOUGH_CHECK(false, op, " computes in fp32, fp64 and bf16, got ", c10::toString(type));
  }
}

// For TORCH_LIBRARY_IMPL(bough, CUDA, m). Registers `kernel` for `op`, unless it is left out
// (cuda_library.h): then the op's reference runs.
template <class Kernel>
void register_cuda_kernel(torch::Library& m, const char* op, Kernel kernel) {
  if (!is_left_out(op)) m.impl(op, kernel);
}

// plain: registered if `kernel` is left out, unless "<op>/plain" is left out, too.
template <class Kernel, class Plain>
void register_cuda_kernel(torch::Library& m, const char* op, Kernel kernel, Plain plain) {
  if (!is_left_out(op)) m.impl(op, kernel);
  else if (!is_left_out(std::string(op) + "/plain")) m.impl(op, plain);
}

// Returns the minimum number of rows per thread. With fewer, starting the thread costs more than its work.
inline int64_t grain(int64_t elements_per_row) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, elements_per_row));
}

}  // namespace bough

// Our ops live in torch's dispatcher under `bough::`, so that Python finds them as torch.ops.bough.* and the CUDA
// library adds its kernels when it is opened. The reference, written in tensor ops, is registered for every
// device; a CPU or CUDA kernel takes precedence where there is one.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace bough {

template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace bough

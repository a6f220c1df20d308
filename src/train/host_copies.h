// A stack of device tensors that are offloaded to host memory and taken back last-in, first-out. Used for the
// inputs of layers that are recomputed (RecomputePolicy::kLayerInputsOnHost).
//
// On a GPU the copies overlap with computation: they run on a stream of their own and use pinned memory,
// which libtorch's allocator reuses from pass to pass. At most two tensors are on the device at a time:
//
//   forward    put(x3): layer 3 computes, x2 goes to the host    put(x4): layer 4 computes, x3 goes
//   backward   take() = x4: layer 4 computes, x3 comes back      take() = x3: layer 3 computes, x2 comes
//
// This object holds the source of a copy until the compute stream has been told to wait for that copy. So the
// source's memory can be reused only after the copy, however far the host runs ahead of the GPU.
// Tensor::record_stream would free the memory later, when the host sees that the copy is done. A host that
// runs ahead would then allocate memory for the whole pass.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

namespace bough {

class HostCopies {
 public:
  HostCopies() = default;
  HostCopies(const HostCopies&) = delete;
  HostCopies& operator=(const HostCopies&) = delete;
  ~HostCopies();

  // All tensors must be on one device and contiguous. The caller must not write to x afterwards. Throws
  // InternalError if x is not contiguous.
  void put(at::Tensor x);
  // Returns the last tensor that was put and not taken yet, on the device and bit-identical. Throws
  // InternalError if none is left.
  at::Tensor take();

 private:
  void copy(const at::Tensor& to, at::Tensor from);
  void finish_copy();  // makes the compute stream wait for the pending copy

  std::vector<at::Tensor> on_host_;
  at::Tensor on_device_;  // the last tensor
  // The pending copy on a GPU.
  at::Tensor source_;
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> done_;
};

}  // namespace bough

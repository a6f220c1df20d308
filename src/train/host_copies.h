// Tensors of a device that wait in the host's memory until they are needed again, the last one first: the
// inputs of layers that are computed again (Keep::kLayerInputsOnHost).
//
// On a GPU the copies go beside its computing, on a stream of their own, from and to pinned memory, which
// libtorch's allocator hands from one pass to the next. Two tensors at a time are on the device:
//
//   forward    put(x3) layer 3 computes, x2 goes      put(x4) layer 4 computes, x3 goes      x3, x4 stay
//   backward   take() = x4: layer 4 computes, x3 comes      take() = x3: layer 3 computes, x2 comes
//
// The source of a copy is kept until the device's computing waits for that copy: its memory is used again
// only behind that, however far the host is ahead. (With Tensor::record_stream it would be free whenever the
// copy has been seen to be done, and a host that is ahead allocates the whole pass meanwhile.)
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

  // All tensors are of one device, contiguous, and nobody writes to them.
  void put(at::Tensor x);
  // The last one that was put and not taken yet: on the device, with the bits that it had.
  at::Tensor take();

 private:
  void copy(const at::Tensor& to, at::Tensor from);
  void finish_copy();  // what is computed from here on comes after the copy under way

  std::vector<at::Tensor> on_host_;
  at::Tensor on_device_;  // the last one
  // Of a GPU: the copy under way.
  at::Tensor source_;
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> done_;
};

}  // namespace bough

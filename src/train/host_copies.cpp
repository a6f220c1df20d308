#include "train/host_copies.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/error.h"

namespace bough {

namespace {

c10::Stream present_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

// If an exception ends plan execution, a copy may still run. The memory of its source and target must not be
// freed before the copy ends.
HostCopies::~HostCopies() {
  try {
    finish_copy();
  } catch (const std::exception&) {  // the device is lost, and so is the copy
  }
}

void HostCopies::put(at::Tensor x) {
  BOUGH_CHECK(x.is_contiguous(), "got a tensor of shape ", x.sizes(), " that is not contiguous");
  finish_copy();
  if (on_device_.defined()) {
    on_host_.push_back(at::empty(x.sizes(), x.options().device(at::kCPU).pinned_memory(!x.is_cpu())));
    copy(on_host_.back(), std::move(on_device_));
  }
  on_device_ = std::move(x);
}

at::Tensor HostCopies::take() {
  BOUGH_CHECK(on_device_.defined(), "take() was called more often than put()");
  finish_copy();
  at::Tensor taken = std::move(on_device_);
  if (!on_host_.empty()) {
    on_device_ = at::empty_like(taken);
    at::Tensor source = std::move(on_host_.back());
    on_host_.pop_back();
    copy(on_device_, std::move(source));
  }
  return taken;
}

void HostCopies::copy(const at::Tensor& to, at::Tensor from) {
  const at::Device device = from.is_cpu() ? to.device() : from.device();
  if (device.is_cpu()) {
    to.copy_(from);
    return;
  }
  if (!stream_) {
    stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
    done_.emplace(device.type());
  }
  // The copy starts after the kernels that are queued on the current stream: they compute the source and may
  // still read the target.
  c10::Event ready(device.type());
  ready.record(present_stream(device));
  ready.block(*stream_);
  {
    const c10::StreamGuard guard(*stream_);
    to.copy_(from, /*non_blocking=*/true);
  }
  done_->record(*stream_);
  source_ = std::move(from);
}

void HostCopies::finish_copy() {
  if (!source_.defined()) return;
  done_->block(present_stream(stream_->device()));
  source_.reset();
}

}  // namespace bough

#include "train/stage_links.h"

#include <ATen/ATen.h>

#include "models/pipeline_stage.h"
#include "models/tensor_parallel.h"

namespace bough {

void StageLinks::send(const at::Tensor& values, Way way) {
  while (!sent_.empty() && sent_.front().pending->is_done()) finish_first();
  Communicator& group = ranks(way);
  Sent sent{.values = values.to(buffer_device(values, group)).contiguous(),
            .way = way,
            .message = {},
            .pending = {}};
  sent.message =
      message_of(Collective::Kind::kSend, sent.values, group.rank() + (way == Way::kForward ? 1 : -1));
  sent.pending = group.begin(sent.message);
  sent_.push_back(std::move(sent));
}

at::Tensor StageLinks::receive(at::IntArrayRef sizes, Way way) {
  Communicator& group = ranks(way);
  const at::Device device = model_.device();
  const at::Tensor buffer = at::empty(
      sizes, at::TensorOptions()
                 .dtype(model_.dtype())
                 .device(device.is_cuda() && group.takes_device_buffers() ? device : at::Device(at::kCPU)));
  group.run(message_of(Collective::Kind::kReceive, buffer, group.rank() - (way == Way::kForward ? 1 : -1)));
  return buffer.to(device);
}

void StageLinks::finish_first() {
  const Sent& first = sent_.front();
  ranks(first.way).finish(*first.pending, first.message);
  sent_.pop_front();
}

void StageLinks::finish() {
  while (!sent_.empty()) finish_first();
}

}  // namespace bough

// Messages between neighboring pipeline stages (models/pipeline_stage.h) during plan execution: hidden states
// go forward, their gradients backward. send() does not block: this object holds the tensor until it arrived.
// Messages of one direction arrive in the order in which they were sent.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>

#include "comm/communicator.h"
#include "models/model.h"

namespace bough {

class StageLinks {
 public:
  enum class Way { kForward, kBackward };

  // The model must outlive this object. A model of one stage sends and receives nothing.
  explicit StageLinks(const Model& model) : model_(model) {}

  void send(const at::Tensor& values, Way way);  // to the next or the previous stage
  // Waits for a tensor of the model's dtype and returns it on the model's device.
  at::Tensor receive(at::IntArrayRef sizes, Way way);
  void finish();  // waits until everything that was sent has arrived

 private:
  struct Sent {
    at::Tensor values;
    Way way;
    Collective message;
    std::unique_ptr<PendingCollective> pending;
  };
  Communicator& ranks(Way way) const {
    return *(way == Way::kForward ? model_.ranks().stages : model_.ranks().stages_back);
  }
  void finish_first();

  const Model& model_;
  std::deque<Sent> sent_;
};

}  // namespace bough

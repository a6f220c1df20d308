// What a stage of a pipeline (models/pipeline.h) sends its neighbours in a walk, and gets of them: hidden
// states, forward, and their gradients, backward. Sending does not wait: the tensor is held until its
// receiver has it. Messages of one way arrive in the order in which they were sent.
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

  // The model must outlive it. Of a model of one stage nothing is sent.
  explicit StageLinks(const Model& model) : model_(model) {}

  void send(const at::Tensor& values, Way way);  // to the next stage, or the one before
  // Of the model's dtype, on its device. Waits for it.
  at::Tensor receive(at::IntArrayRef sizes, Way way);
  void finish();  // all that was sent has arrived

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

// AdamW steps of weights on a GPU whose moments and masters are in host memory (Optimizer, `offload`).
//
// Parameters are cut into pieces. While the CPU updates one piece, the gradient of the next piece arrives and
// the weights of the last piece leave, on a stream of their own and through two pairs of pinned buffers:
//
//   side stream   fetch 0, fetch 1           send 0, fetch 2           send 1, fetch 3 ...
//   CPU                     update 0                   update 1                  update 2 ...
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/adamw/adamw.h"

namespace bough {

// Copies between a device and pinned memory, done in the order in which they are begun, numbered from 0.
class OrderedCopies {
 public:
  virtual ~OrderedCopies() = default;
  virtual at::Tensor allocate(int64_t bytes) = 0;
  virtual void enter() = 0;  // copies begun from now on follow the work that the caller has queued
  virtual int64_t begin(const at::Tensor& to, const at::Tensor& from) = 0;  // returns the copy's number
  virtual void finish(int64_t number) = 0;  // waits until this copy and those before it are done
  virtual void leave() = 0;                 // work that the caller queues from now on follows all copies
};
std::unique_ptr<OrderedCopies> copies_on_side_stream(at::Device device);

class OffloadedUpdate {
 public:
  static constexpr int64_t kPieceElements = int64_t{1} << 23;

  explicit OffloadedUpdate(std::unique_ptr<OrderedCopies> copies, int64_t piece_elements = kPieceElements)
      : copies_(std::move(copies)), piece_elements_(piece_elements) {}

  // One adamw() call. Value and gradient are on the device, the other tensors in host memory. All have one
  // dimension.
  struct Call {
    AdamwState state;
    AdamwStep step;
  };
  // Makes the calls in order. The values are updated when the device has done the work that is queued on the
  // current stream. The gradients are unchanged: the caller zeroes them.
  void run(const std::vector<Call>& calls);

 private:
  struct Slot {
    at::Tensor gradient, value;  // bytes
    int64_t arrived = 0;         // number of the copy after which the CPU may update
  };

  std::unique_ptr<OrderedCopies> copies_;
  const int64_t piece_elements_;
  std::array<Slot, 2> slots_;
};

}  // namespace bough

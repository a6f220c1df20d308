// What planning asks of a model on a device: seconds and bytes of one pass, from its shape alone. The room
// `cost` answers from measured rates and the kernels' own figures; tests of plans from a made-up device
// (test_costs.h).
#pragma once

#include <cstdint>

namespace bough {

// What a pass through the model works on. What is left at its default is taken as of a block of one path.
struct PassShape {
  int64_t tokens = 0;
  int64_t stack_rows = 0;  // keys and values below it
  int64_t pairs = 0;       // visible (query, key) pairs
  int64_t head_rows = 0;   // rows of the head
  int64_t stack_pairs =
      -1;              // of `pairs`, those with a key on the stack; -1: every token sees the whole stack
  int64_t pieces = 1;  // runs of consecutive tokens, each the parent of the next
  int64_t loss_rows =
      -1;  // of the loss: more than head_rows where sequences share trained tokens; -1: as many
};

class PassCosts {
 public:
  virtual ~PassCosts() = default;

  // Through the layers, without the head. A pass of no tokens costs nothing.
  virtual double forward_seconds(const PassShape& pass) const = 0;
  virtual double backward_seconds(const PassShape& pass) const = 0;
  // The parts of those that are attention.
  virtual double attention_forward_seconds(const PassShape& pass) const = 0;
  virtual double attention_backward_seconds(const PassShape& pass) const = 0;
  virtual double head_forward_seconds(const PassShape& pass) const = 0;
  virtual double head_backward_seconds(const PassShape& pass) const = 0;

  // Bytes over weights and gradients. A pass with a graph takes tokens * activation_bytes() +
  // temporary_bytes(), at its peak, beside the stack and the exits and rows of the whole walk.
  virtual int64_t stack_row_bytes() const = 0;   // keys, values and their gradients of one token, all layers
  virtual int64_t activation_bytes() const = 0;  // what autograd keeps of one token, all layers
  virtual int64_t attention_bytes()
      const = 0;  // attention's outputs and log-sum-exps of one token, all layers
  virtual int64_t exit_bytes()
      const = 0;  // a final hidden state that another block's head reads, and its gradient
  virtual int64_t row_bytes()
      const = 0;  // of one row of the batch's loss: its fields and values, the whole walk long
  // Bytes in flight at once beside what is still alive of the activations: the largest of the head's chunk,
  // the last layer's MLP and its attention, backward. An upper bound; may be negative for a wide MLP, which
  // frees its activations before attention needs room.
  virtual int64_t temporary_bytes(const PassShape& pass) const = 0;
};

}  // namespace bough

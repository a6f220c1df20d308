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

// What a block holds between its forward and its backward, beside an interior one's keys and values.
enum class Keep {
  kKeysValues,  // nothing: backward runs the whole forward again; interior blocks only
  kAttention,   // attention's outputs and log-sum-exps: backward runs all but attention again; interior ones
  // Each layer's input: a layer is computed again just before its own backward, so that the activations of
  // one layer are held at a time (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
  kLayerInputs,
  kLayerInputsAndAttention,  // and attention's outputs: all of a layer but attention is computed again
  kLayerInputsOnHost,        // two of the layers' inputs at a time, the others in the host's memory
  kActivations,              // all: backward runs nothing again
};
constexpr bool recomputes_layers(Keep keep) {
  return keep == Keep::kLayerInputs || keep == Keep::kLayerInputsAndAttention ||
         keep == Keep::kLayerInputsOnHost;
}
// Backward goes through the graph of the block's first forward, not through one of a second.
constexpr bool keeps_graph(Keep keep) {
  return keep == Keep::kActivations || recomputes_layers(keep);
}

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
  // Of what a block that keeps this computes again for its backward, with what its copies to the host and
  // back take beyond the computing beside which they go. 0 for all activations.
  virtual double recompute_seconds(const PassShape& pass, Keep keep) const = 0;

  // Bytes over weights and gradients. A pass with a graph takes tokens * kept_bytes() + temporary_bytes() of
  // what it keeps, at its peak, beside the stack and the exits and rows of the whole walk; one that computes
  // the whole forward again as one that keeps activations does.
  virtual int64_t stack_row_bytes() const = 0;  // keys, values and their gradients of one token, all layers
  // Of one token, all layers. What waits in the host's memory counts where that is the device's own.
  virtual int64_t kept_bytes(Keep keep) const = 0;
  virtual int64_t exit_bytes()
      const = 0;  // a final hidden state that another block's head reads, and its gradient
  virtual int64_t row_bytes()
      const = 0;  // of one row of the batch's loss: its fields and values, the whole walk long
  // Bytes in flight at once beside what is still alive of what is kept: the largest of the head's chunk,
  // the last layer's MLP and its attention, backward, with the layer's activations where it is computed
  // again. An upper bound; may be negative for a wide MLP, which frees its activations before attention needs
  // room.
  virtual int64_t temporary_bytes(const PassShape& pass, Keep keep) const = 0;
};

}  // namespace bough

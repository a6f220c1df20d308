// PassCosts, the cost model of the planner: seconds and bytes of one pass of a model on a device, from the
// pass's shape alone. The module `cost` implements it from measured rates and the kernels' own byte counts.
// Tests of plans use an artificial device (test_costs.h).
#pragma once

#include <cstdint>

namespace bough {

// The shape of a pass through the model. The defaults describe a block of one path.
struct PassShape {
  int64_t tokens = 0;
  int64_t stack_rows = 0;  // tokens on the prefix KV stack that the pass reads
  int64_t pairs = 0;       // visible (query, key) pairs
  int64_t head_rows = 0;   // rows of the lm_head: tokens that at least one sequence trains
  int64_t stack_pairs =
      -1;                  // (query, key) pairs with a key on the stack; -1: every token sees the whole stack
  int64_t pieces = 1;      // runs of consecutive tokens; in a run, each token is the parent of the next
  int64_t loss_rows = -1;  // loss rows: each trained token once per sequence that trains it; -1: head_rows
};

// The recompute policy of a block: which tensors it holds between its forward and its backward (its
// checkpointed activations). The keys and values of interior blocks are always held and not counted here.
enum class RecomputePolicy {
  kKeysValues,  // nothing: backward repeats the whole forward. Interior blocks only.
  kAttention,   // attention outputs and log-sum-exps: backward repeats the rest. Interior blocks only.
  // Each layer's input. A layer is recomputed just before its backward, so all activations are held for only
  // one layer at a time (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").
  kLayerInputs,
  kLayerInputsAndAttention,  // layer inputs and attention outputs: recomputation skips attention
  kLayerInputsOnHost,        // layer inputs in host memory, at most two at a time on the device
  kActivations,              // all activations: backward recomputes nothing
};
constexpr bool recomputes_layers(RecomputePolicy keep) {
  return keep == RecomputePolicy::kLayerInputs || keep == RecomputePolicy::kLayerInputsAndAttention ||
         keep == RecomputePolicy::kLayerInputsOnHost;
}
// true: backward uses the graph of the block's first forward. false: a second forward records the graph.
constexpr bool keeps_graph(RecomputePolicy keep) {
  return keep == RecomputePolicy::kActivations || recomputes_layers(keep);
}

class PassCosts {
 public:
  virtual ~PassCosts() = default;

  // Seconds for the layers, without the lm_head. 0 for a pass without tokens.
  virtual double forward_seconds(const PassShape& pass) const = 0;
  virtual double backward_seconds(const PassShape& pass) const = 0;
  // The attention part of the two times above.
  virtual double attention_forward_seconds(const PassShape& pass) const = 0;
  virtual double attention_backward_seconds(const PassShape& pass) const = 0;
  virtual double head_forward_seconds(const PassShape& pass) const = 0;
  virtual double head_backward_seconds(const PassShape& pass) const = 0;
  // Seconds of the recomputation before backward, if the block's policy is `keep`. Includes the part of the
  // copies to and from host memory that does not overlap with computation. 0 for kActivations.
  virtual double recompute_seconds(const PassShape& pass, RecomputePolicy keep) const = 0;

  // Bytes, in addition to weights and gradients. A pass that records a graph needs at its peak tokens *
  // kept_bytes(keep) + temporary_bytes(pass, keep), plus the bytes of the stack, of boundary hidden states
  // and of loss rows. For kKeysValues and kAttention, the second forward records the graph, and its pass
  // counts as kActivations.
  virtual int64_t stack_row_bytes() const = 0;  // keys, values and their gradients of one token, all layers
  // Bytes of the activations that the policy keeps of one token, all layers. Bytes in host memory count only
  // if the device is the host.
  virtual int64_t kept_bytes(RecomputePolicy keep) const = 0;
  virtual int64_t boundary_bytes()
      const = 0;  // one final hidden state that another block reads, and its gradient
  virtual int64_t row_bytes()
      const = 0;  // one loss row: its inputs and outputs, held during the whole plan execution
  // Upper bound of the bytes of temporaries at the peak of backward: the maximum of a chunk of the lm_head,
  // the last layer's MLP and the last layer's attention. If layers are recomputed, the activations of one
  // layer are included. May be negative: a wide MLP frees more kept activations than attention then
  // allocates.
  virtual int64_t temporary_bytes(const PassShape& pass, RecomputePolicy keep) const = 0;
};

}  // namespace bough

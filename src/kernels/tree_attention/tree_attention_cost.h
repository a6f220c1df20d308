// What tree attention costs, from shapes alone: FLOPs, how many (query, key) pairs a kernel computes for a
// pass, which are more than those that are visible, since kernels work on tiles of queries and keys and
// threads wait for the one that got the most; and the bytes it works in. The kernels cut their work by the
// same numbers. No torch.
#pragma once

#include "kernels/common/device_kernels.h"
#include "kernels/tree_attention/unit_mask.h"

namespace bough {

// Units of keys whose gradients one thread sums while all queries pass.
constexpr int64_t kFp32BackwardUnits = 8, kBf16BackwardUnits = 4;
// What backward holds of every head's queries: each and its gradient of outputs in two layouts, and two
// scalars.
constexpr int64_t kQueryLayouts = 4, kQueryScalars = 2;

// FLOPs of one visible pair in forward, of one head: q·k and p·v.
constexpr int64_t tree_attention_flops(int64_t head_dim) {
  return 4 * head_dim;
}

struct AttentionPass {
  int64_t queries = 0;       // T
  double stack_keys = 0;     // that a query sees, on average
  double own_keys = 0;       // that it sees within the pass, itself included, on average
  int64_t pieces = 1;        // runs of consecutive tokens, each the parent of the next
  int64_t num_kv_heads = 1;  // G: heads are spread over threads by their groups
};

// (query, key) pairs of one head in the time that they take: those of the busiest thread times the number of
// threads.
//   kTiles, kBf16Tiles   as tree_attention_units.h cuts and spreads its work
//   kReference          all queries times all keys
//   kFused              the visible pairs, half a tile of 128 at the diagonal, and a tile more where pieces
//                       straddle tiles
double attention_work(const DeviceKernels& kernels, const AttentionPass& pass);

// Queries that the kernel computes for a pass of so many; where it works in units, a multiple of 32.
int64_t attention_rows(DeviceKernels::Attention kind, int64_t queries);

// How many pieces a group's work in units is cut into, so that those of all groups are a multiple of the
// threads; at most `most`.
int64_t attention_shares(int64_t threads, int64_t num_kv_heads, int64_t most);

struct AttentionHeads {
  int64_t num_heads, num_kv_heads, head_dim;
};

// Bytes in flight in one call, forward or backward, beside inputs, outputs and gradients.
int64_t tree_attention_bytes(const DeviceKernels& kernels, const ElementSizes& sizes,
                             const AttentionHeads& heads, int64_t tokens, int64_t stack_rows);

}  // namespace bough

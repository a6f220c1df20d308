// The cost of tree attention, from shapes alone: FLOPs, computed (query, key) pairs and memory. Kernels
// compute more pairs than are visible, because they compute whole tiles and because threads wait for the
// slowest thread. The CPU kernels use the same functions to divide pairs among threads. No torch.
#pragma once

#include "kernels/common/device_kernels.h"
#include "kernels/tree_attention/unit_mask.h"

namespace bough {

// Units of keys (tree_attention_units.h) whose gradients a thread sums at a time, over all queries.
constexpr int64_t kFp32BackwardUnits = 8, kBf16BackwardUnits = 4;
// Backward keeps q and d_o of every query head in two layouts each, and two scalars (log-sum-exp and D).
constexpr int64_t kQueryLayouts = 4, kQueryScalars = 2;

// FLOPs of forward for one visible (query, key) pair of one head: q·k and p·v.
constexpr int64_t tree_attention_flops(int64_t head_dim) {
  return 4 * head_dim;
}

struct AttentionPass {
  int64_t queries = 0;       // T
  double stack_keys = 0;     // stack keys that a query sees, on average
  double own_keys = 0;       // keys of the pass that a query sees, itself included, on average
  int64_t pieces = 1;        // number of chains; in a chain each token is the parent of the next token
  int64_t num_kv_heads = 1;  // G; threads divide them
};

// Returns the (query, key) pairs of one query head, as a measure of time: the pairs of the thread with the
// most pairs, times the number of threads. Pairs that are counted, by kind of kernel:
//   kTiles, kBf16Tiles  the pairs in units (tree_attention_units.h)
//   kReference          all queries times all keys; also kReferenceOnGpu
//   kFused              the visible pairs, and for each query half a tile of 128 keys at the diagonal; with
//                       several pieces, up to one more tile for each query where a piece ends inside a tile
double attention_work(const DeviceKernels& kernels, const AttentionPass& pass);

// Returns how many queries the kernel computes: with kTiles and kBf16Tiles, `queries` rounded up to a
// multiple of 32.
int64_t attention_rows(DeviceKernels::Attention kind, int64_t queries);

// Returns the number of shares, at most `most`, into which the units of one key/value head are divided. If
// `most` allows, the number of shares of all key/value heads is a multiple of the threads.
int64_t attention_shares(int64_t threads, int64_t num_kv_heads, int64_t most);

struct AttentionHeads {
  int64_t num_heads, num_kv_heads, head_dim;
};

// Returns the peak memory in bytes of a forward or backward call, whichever needs more, without inputs,
// outputs and gradients.
int64_t tree_attention_bytes(const DeviceKernels& kernels, const ElementSizes& sizes,
                             const AttentionHeads& heads, int64_t tokens, int64_t stack_rows);

}  // namespace bough

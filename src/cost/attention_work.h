// How much attention computes for a pass: more than the pairs that are visible, since kernels work on tiles of queries
// and keys, and threads wait for the one that got the most.
#pragma once

#include <cstdint>

#include "cost/device_profile.h"

namespace bough {

struct AttentionPass {
  int64_t queries = 0;       // T
  double stack_keys = 0;     // that a query sees, on average
  double own_keys = 0;       // that it sees within the pass, itself included, on average
  int64_t pieces = 1;        // runs of consecutive tokens, each the parent of the next
  int64_t num_kv_heads = 1;  // G: heads are spread over threads by their groups
};

// (query, key) pairs of one head in the time that they take: those of the busiest thread times the number of threads.
//   kTiles, kBf16Tiles   as kernels/tree_attention/tree_attention_units.h cuts and spreads its work
//   kReference          all queries times all keys
//   kFused              the visible pairs, half a tile of 128 at the diagonal, and a tile more where pieces straddle tiles
double attention_work(DeviceProfile::Attention kind, int64_t threads, const AttentionPass& pass);

// Queries that the kernel computes for a pass of so many: of units a multiple of 32.
int64_t attention_rows(DeviceProfile::Attention kind, int64_t queries);

// Into how many shares a group's work in units is cut, at most so many.
int64_t attention_shares(int64_t threads, int64_t num_kv_heads, int64_t most);

}  // namespace bough

// How keys and values lie in pages on the CPU: kPageTokens consecutive tokens of one sequence each.
//
// A layer's pages are one tensor [pages, G, 2, kPageTokens * padded H]. Of a page's head g come first the
// keys [padded H / P] [16 tokens][P], then the values [16 / P tokens][padded H][P], with P = 2 in bf16, whose
// dot products take pairs (of neighbours in h for keys, of tokens for values), else 1. H is padded with
// zeros, so that loops over h need no tail. Slots that no token has been written to hold anything, NaN
// included: readers mask by length; but the first token of a page clears its values.
#pragma once

#include "kernels/paged_attention/paged_attention_task.h"

namespace bough {

inline int64_t pages_for(int64_t num_tokens) {
  return (num_tokens + kPageTokens - 1) / kPageTokens;
}
inline int64_t padded_head_dim(int64_t head_dim) {
  constexpr int64_t kHeadPadding = 32;  // the depth of a tile of bf16
  return (head_dim + kHeadPadding - 1) / kHeadPadding * kHeadPadding;
}

}  // namespace bough

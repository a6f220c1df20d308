// The layout of keys and values in pages on the CPU. A page holds kPageTokens consecutive tokens of one
// sequence.
//
// The pages of a layer are one tensor [pages, G, 2, kPageTokens * padded H]. For each page and head there are
// first the keys [padded H / P][16 tokens][P], then the values [16 / P tokens][padded H][P]. P is 2 in bf16,
// because its dot products take pairs (two neighbouring h of a key, two neighbouring tokens of the values),
// else 1. H is padded with zeros, so that loops over h need no tail. A slot without a token holds arbitrary
// bits. Readers mask the scores of such slots, so their weight is 0, but 0 * NaN is NaN. Storing the first
// token of a page therefore sets all of the page's values to 0.
#pragma once

#include "kernels/paged_attention/paged_attention_task.h"

namespace bough {

inline int64_t pages_for(int64_t num_tokens) {
  return (num_tokens + kPageTokens - 1) / kPageTokens;
}
inline int64_t padded_head_dim(int64_t head_dim) {
  constexpr int64_t kHeadPadding = 32;  // inner dimension of a bf16 tile
  return (head_dim + kHeadPadding - 1) / kHeadPadding * kHeadPadding;
}

}  // namespace bough

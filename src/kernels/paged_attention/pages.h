// How keys and values lie in pages: kPageTokens consecutive tokens of one sequence each.
#pragma once

#include <cstdint>

namespace bough {

inline constexpr int64_t kPageTokens = 16;  // one AVX-512 register of fp32 scores

inline int64_t pages_for(int64_t num_tokens) {
  return (num_tokens + kPageTokens - 1) / kPageTokens;
}
// Of the values' rows in a page: loops over a head need no tail.
inline int64_t padded_head_dim(int64_t head_dim) {
  return pages_for(head_dim) * kPageTokens;
}

}  // namespace bough

// What log-probabilities of a head's rows cost, from shapes alone; no torch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace bough {

// Rows of a chunk of logits where none are asked for: about 16 MiB in fp32, but enough for an efficient product.
inline int64_t head_chunk_rows(int64_t vocab_size) {
  return std::max<int64_t>(64, (int64_t{4} << 20) / vocab_size);
}

}  // namespace bough

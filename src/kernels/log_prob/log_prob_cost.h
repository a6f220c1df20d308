// What log-probabilities of a head's rows cost, from shapes alone; no torch.
#pragma once

#include <algorithm>

#include "kernels/common/device_kernels.h"

namespace bough {

// Rows of a chunk of logits where none are asked for. On a CPU about 16 MiB in fp32, which its caches hold,
// but enough for an efficient product. A GPU reads and writes the head's weight and its gradient with every
// chunk, 7.5 GB at a vocabulary of 152K and a width of 4,096, so that few rows leave it waiting for memory:
// about 1.2 GB of logits in bf16, at most 4,096 rows.
inline int64_t head_chunk_rows(int64_t vocab_size, bool on_gpu = false) {
  if (on_gpu) return std::clamp<int64_t>((int64_t{600} << 20) / vocab_size, 256, 4096);
  return std::max<int64_t>(64, (int64_t{4} << 20) / vocab_size);
}

// Bytes of a chunk: logits, which become their gradients in place; for each row its log-probability, entropy,
// their gradients and the log-sum-exp, the target and the row's number.
inline int64_t log_prob_bytes(const ElementSizes& sizes, int64_t rows, int64_t vocab_size) {
  return rows * (vocab_size * sizes.element + 5 * sizes.accumulator + 2 * int64_t{8});
}

}  // namespace bough

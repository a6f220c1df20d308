// The cost of log-probabilities, from shapes alone. No torch.
#pragma once

#include <algorithm>

#include "kernels/common/device_kernels.h"

namespace bough {

// Default number of rows in a chunk of logits. On a CPU: about 16 MiB in fp32, which fit in the caches but
// are enough for an efficient product. On a GPU: about 1.2 GB in bf16, at most 4,096 rows. For every chunk, a
// GPU reads and writes the weight of lm_head and its gradient: 7.5 GB at a vocabulary of 152K and a width of
// 4,096. With fewer rows per chunk, it would wait for memory.
inline int64_t head_chunk_rows(int64_t vocab_size, bool on_gpu = false) {
  if (on_gpu) return std::clamp<int64_t>((int64_t{600} << 20) / vocab_size, 256, 4096);
  return std::max<int64_t>(64, (int64_t{4} << 20) / vocab_size);
}

// Bytes of a chunk: the logits, which become their gradients in place, and for each row the log-probability,
// the entropy, their gradients, the log-sum-exp, the label and the row number.
inline int64_t log_prob_bytes(const ElementSizes& sizes, int64_t rows, int64_t vocab_size) {
  return rows * (vocab_size * sizes.element + 5 * sizes.accumulator + 2 * int64_t{8});
}

}  // namespace bough

#include "train/memory.h"

#include <algorithm>

#include "kernels/parameter.h"
#include "train/head.h"

namespace bough {

MemoryEstimate estimate_memory(const ModelConfig& config, at::ScalarType dtype,
                               const Simulation& simulation) {
  const int64_t element = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t accumulator = static_cast<int64_t>(c10::elementSize(accumulator_type(dtype)));
  const int64_t width = config.hidden_size;
  const int64_t query = config.num_heads * config.head_dim;
  const int64_t key_value = config.num_kv_heads * config.head_dim;
  const int64_t projection = query + 2 * key_value;
  const int64_t tokens = simulation.peak_pass_tokens;
  MemoryEstimate bytes;
  bytes.stack = simulation.peak_stack_tokens * config.num_layers * 2 * key_value * (element + accumulator);
  // Of a layer: both residuals and their norms; q, k, v before and after norm and rotary embedding; attention's
  // output; gate, up and their product; and, in the accumulator type, its log-sum-exp and both norms' scales.
  const int64_t kept = (4 * width + 2 * projection + query + 3 * config.intermediate_size) * element +
                       (config.num_heads + 2) * accumulator;
  bytes.activations = tokens * config.num_layers * kept;
  // In flight at once: the residual's gradient and its parts, then either the MLP's gradients (with inputs widened
  // for the weight gradient) or attention's: q and d_o in two layouts each, d_q, and d_k, d_v of the pass. Query
  // tiles are padded to 32 rows at least.
  const int64_t padded_tokens = tokens + 32;
  const int64_t mlp = tokens * (6 * config.intermediate_size + 4 * width) * accumulator;
  const int64_t attention = padded_tokens * (6 * query + 2 * projection + 2 * config.num_heads) * accumulator;
  const int64_t rows = std::min(tokens, head_chunk_rows(config.vocab_size));
  const int64_t head = rows * ((config.vocab_size + 2 * width) * element + 2 * width * accumulator) +
                       tokens * (3 * width) * accumulator;
  // Final hidden states, rotary angles, ids, masks.
  const int64_t pass = tokens * (6 * width * accumulator + 3 * config.head_dim * accumulator + 32) +
                       simulation.peak_stack_tokens * (8 + 4);
  bytes.temporaries = std::max({mlp, attention, head}) + pass;
  return bytes;
}

}  // namespace bough

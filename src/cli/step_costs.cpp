#include "cli/step_costs.h"

#include "kernels/parameter.h"

namespace bough {

WorkModel work_model(const ModelConfig& config) {
  const int64_t query = config.num_heads * config.head_dim;
  const int64_t key_value = config.num_kv_heads * config.head_dim;
  const int64_t per_layer =
      config.hidden_size * (2 * query + 2 * key_value) + 3 * config.hidden_size * config.intermediate_size;
  WorkModel work;
  work.flops_per_token = 2.0 * static_cast<double>(config.num_layers * per_layer);
  work.flops_per_head_row = 2.0 * static_cast<double>(config.hidden_size * config.vocab_size);
  work.flops_per_pair = 4.0 * static_cast<double>(config.num_layers * query);  // scores, then their sum of values
  return work;
}

int64_t estimate_peak_bytes(const ModelConfig& config, at::ScalarType dtype, const Simulation& simulation) {
  const int64_t element = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t accumulator = static_cast<int64_t>(c10::elementSize(accumulator_type(dtype)));
  const int64_t query = config.num_heads * config.head_dim;
  const int64_t key_value = config.num_kv_heads * config.head_dim;
  const int64_t stack_row = config.num_layers * 2 * key_value * (element + accumulator);
  // Of a layer: both residuals and their norms, q, k, v before and after norm and rotary embedding, attention's
  // output, gate, up and their product.
  const int64_t kept = 4 * config.hidden_size + 2 * (query + 2 * key_value) + query + 3 * config.intermediate_size;
  return simulation.peak_stack_tokens * stack_row + simulation.peak_pass_tokens * config.num_layers * kept * element;
}

}  // namespace bough

#include "cli/step_costs.h"

namespace bough {

WorkModel work_model(const ModelConfig& config) {
  const int64_t query = config.num_heads * config.head_dim;
  const int64_t key_value = config.num_kv_heads * config.head_dim;
  const int64_t per_layer =
      config.hidden_size * (2 * query + 2 * key_value) + 3 * config.hidden_size * config.intermediate_size;
  WorkModel work;
  work.flops_per_token = 2.0 * static_cast<double>(config.num_layers * per_layer);
  work.flops_per_head_row = 2.0 * static_cast<double>(config.hidden_size * config.vocab_size);
  work.flops_per_pair =
      4.0 * static_cast<double>(config.num_layers * query);  // scores, then their sum of values
  return work;
}

}  // namespace bough

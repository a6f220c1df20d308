#include "train/kv_stack.h"

#include <ATen/ops/empty.h>

#include "base/error.h"
#include "kernels/parameter.h"

namespace bough {

KvStack::KvStack(const ModelConfig& config, int64_t capacity, at::ScalarType dtype, at::Device device,
                 bool with_gradients)
    : capacity_(capacity) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  const std::vector<int64_t> sizes = {capacity, config.num_kv_heads, config.head_dim};
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    k_.push_back(at::empty(sizes, options));
    v_.push_back(at::empty(sizes, options));
    if (!with_gradients) continue;
    d_k_.push_back(at::empty(sizes, options.dtype(accumulator_type(dtype))));
    d_v_.push_back(at::empty(sizes, options.dtype(accumulator_type(dtype))));
  }
}

void KvStack::push(int32_t first_token, int32_t end_token) {
  const int64_t begin = num_rows();
  const int64_t count = end_token - first_token;
  BOUGH_CHECK(begin + count <= capacity_, "stack of ", begin, " rows, pushing ", count, ", capacity ",
              capacity_);
  for (int32_t t = first_token; t < end_token; ++t) tokens_.push_back(t);
  for (auto& gradient : d_k_) gradient.narrow(0, begin, count).zero_();
  for (auto& gradient : d_v_) gradient.narrow(0, begin, count).zero_();
}

void KvStack::pop(int64_t count) {
  BOUGH_CHECK(count <= num_rows(), "popping ", count, " of ", num_rows(), " rows");
  tokens_.resize(tokens_.size() - count);
}

}  // namespace bough

#include "rollout/kv_storage.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "rollout/upload.h"

namespace bough {

KvStorage::KvStorage(const ModelConfig& config, at::ScalarType dtype, at::Device device, int64_t max_pages)
    : num_kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim),
      max_pages_(max_pages),
      dtype_(dtype),
      device_(device),
      keys_(static_cast<size_t>(config.num_layers)),
      values_(static_cast<size_t>(config.num_layers)) {}

int64_t KvStorage::bytes_per_page(const ModelConfig& config, at::ScalarType dtype) {
  return config.num_layers * config.num_kv_heads * kPageTokens *
         (config.head_dim + padded_head_dim(config.head_dim)) * static_cast<int64_t>(c10::elementSize(dtype));
}

void KvStorage::reserve(int64_t num_pages) {
  if (num_pages <= num_pages_) return;
  BOUGH_CHECK(num_pages <= max_pages_, num_pages, " pages asked of ", max_pages_);
  const int64_t grown = device_.is_cuda()
                            ? max_pages_
                            : std::min(max_pages_, std::max<int64_t>({num_pages, 2 * num_pages_, 64}));
  const auto options = at::TensorOptions().dtype(dtype_).device(device_);
  for (size_t layer = 0; layer < keys_.size(); ++layer) {  // one layer at a time: at most one is there twice
    at::Tensor keys, values;
    if (device_.is_cuda()) {
      keys = at::empty({grown, num_kv_heads_, kPageTokens, head_dim_}, options).transpose(2, 3);
      values = at::empty({grown, num_kv_heads_, kPageTokens, head_dim_}, options);
    } else {
      keys = at::empty({grown, num_kv_heads_, head_dim_, kPageTokens}, options);
      values = at::empty({grown, num_kv_heads_, kPageTokens, padded_head_dim(head_dim_)}, options);
    }
    if (num_pages_ > 0) {
      keys.narrow(0, 0, num_pages_).copy_(keys_[layer]);
      values.narrow(0, 0, num_pages_).copy_(values_[layer]);
    }
    keys_[layer] = std::move(keys);
    values_[layer] = std::move(values);
  }
  num_pages_ = grown;
}

void KvStorage::copy_pages(std::span<const std::pair<int32_t, int32_t>> pairs) {
  if (pairs.empty()) return;
  std::vector<int64_t> from, to;
  for (const auto& [source, target] : pairs) {
    from.push_back(source);
    to.push_back(target);
  }
  const at::Tensor from_S = upload(from, device_), to_S = upload(to, device_);
  for (size_t layer = 0; layer < keys_.size(); ++layer) {
    keys_[layer].index_copy_(0, to_S, keys_[layer].index_select(0, from_S));
    values_[layer].index_copy_(0, to_S, values_[layer].index_select(0, from_S));
  }
}

}  // namespace bough

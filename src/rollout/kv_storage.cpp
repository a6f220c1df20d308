#include "rollout/kv_storage.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "kernels/paged_attention/pages.h"
#include "rollout/upload.h"

namespace bough {

KvStorage::KvStorage(const ModelConfig& config, at::ScalarType dtype, at::Device device, int64_t max_pages)
    : num_kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim),
      max_pages_(max_pages),
      dtype_(dtype),
      device_(device),
      layers_(static_cast<size_t>(config.num_layers)) {}

int64_t KvStorage::bytes_per_page(const ModelConfig& config, at::ScalarType dtype) {
  return 2 * config.num_layers * config.num_kv_heads * kPageTokens * padded_head_dim(config.head_dim) *
         static_cast<int64_t>(c10::elementSize(dtype));
}

void KvStorage::reserve(int64_t num_pages) {
  if (num_pages <= num_pages_) return;
  BOUGH_CHECK(num_pages <= max_pages_, num_pages, " pages asked of ", max_pages_);
  const int64_t grown = device_.is_cuda()
                            ? max_pages_
                            : std::min(max_pages_, std::max<int64_t>({num_pages, 2 * num_pages_, 64}));
  const auto options = at::TensorOptions().dtype(dtype_).device(device_);
  for (at::Tensor& layer : layers_) {  // one layer at a time: at most one is there twice
    at::Tensor pages =
        device_.is_cuda()
            ? at::empty({2, grown, num_kv_heads_, kPageTokens, head_dim_}, options)
            : at::empty({grown, num_kv_heads_, 2, kPageTokens * padded_head_dim(head_dim_)}, options);
    if (num_pages_ > 0) pages.narrow(page_dim(), 0, num_pages_).copy_(layer);
    layer = std::move(pages);
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
  for (at::Tensor& layer : layers_)
    layer.index_copy_(page_dim(), to_S, layer.index_select(page_dim(), from_S));
}

at::Tensor KvStorage::keys(int64_t layer) const {
  const int64_t pair = pair_size();
  if (device_.is_cuda()) return pages(layer).select(0, 0).transpose(2, 3).unsqueeze(-1);
  return pages(layer).select(2, 0).view(
      {num_pages_, num_kv_heads_, padded_head_dim(head_dim_) / pair, kPageTokens, pair});
}
at::Tensor KvStorage::values(int64_t layer) const {
  const int64_t pair = pair_size();
  if (device_.is_cuda()) return pages(layer).select(0, 1).unsqueeze(-1);
  return pages(layer).select(2, 1).view(
      {num_pages_, num_kv_heads_, kPageTokens / pair, padded_head_dim(head_dim_), pair});
}

}  // namespace bough

// Keys and values in pages of kPageTokens tokens, for every layer, in the model's dtype on its device.
//
// On the CPU as kernels/paged_attention/pages.h says; on CUDA keys and values of a layer each [pages, G, kPageTokens, H].
// Slots that no token has been written to hold anything, NaN included: readers mask by length; but on the CPU the first
// token of a page clears its values.
//
// All of it is allocated at once and stays where it is (captured CUDA graphs keep its addresses). On the CPU pages that
// were never written take addresses only.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "models/config.h"
#include "rollout/page_pool.h"

namespace bough {

class KvStorage {
 public:
  // UserError where the system has no room for max_pages.
  KvStorage(const ModelConfig& config, at::ScalarType dtype, at::Device device, int64_t max_pages);

  static int64_t bytes_per_page(const ModelConfig& config, at::ScalarType dtype);

  // Copies whole pages, (from, to) each, in every layer.
  void copy_pages(std::span<const std::pair<int32_t, int32_t>> pairs);

  // On the CPU: a layer's pages as its kernel takes them.
  const at::Tensor& pages(int64_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  // Views: [pages, G, H' / P, 16, P] and [pages, G, 16 / P, H', P], with H' = H padded on the CPU and P of pages.h; on
  // CUDA H' = H and P = 1.
  at::Tensor keys(int64_t layer) const;
  at::Tensor values(int64_t layer) const;
  at::Device device() const { return device_; }
  at::ScalarType dtype() const { return dtype_; }
  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
  int64_t num_kv_heads() const { return num_kv_heads_; }
  int64_t head_dim() const { return head_dim_; }

 private:
  int64_t page_dim() const { return device_.is_cuda() ? 1 : 0; }
  int64_t pair_size() const { return dtype_ == at::kBFloat16 && device_.is_cpu() ? 2 : 1; }

  int64_t num_kv_heads_, head_dim_, num_pages_;
  at::ScalarType dtype_;
  at::Device device_;
  // Of each layer. CPU: [pages, G, 2, 16 * padded H]; CUDA: [2, pages, G, 16, H].
  std::vector<at::Tensor> layers_;
};

}  // namespace bough

// Keys and values in pages of kPageTokens tokens, for every layer, in the model's dtype on its device.
//
// Page p, layer l: keys [G, H, kPageTokens] (transposed: one vector holds a page's keys at one h), values [G,
// kPageTokens, padded H] (padded with zeros to a multiple of kPageTokens, so that loops over h need no tail).
// On CUDA both lie in memory as [G, kPageTokens, H], a token's numbers together: keys() is the turned view.
// Slots that no token has been written to hold anything, NaN included: readers mask by length.
//
// Memory grows by doubling, up to `max_pages`, and is never given back: a steady state allocates nothing. On CUDA all
// of it is allocated at once: captured graphs keep its addresses.
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
  KvStorage(const ModelConfig& config, at::ScalarType dtype, at::Device device, int64_t max_pages);

  static int64_t bytes_per_page(const ModelConfig& config, at::ScalarType dtype);

  // Room for pages 0 ... num_pages - 1; what the present ones hold is kept.
  void reserve(int64_t num_pages);
  // Copies whole pages, (from, to) each, in every layer.
  void copy_pages(std::span<const std::pair<int32_t, int32_t>> pairs);

  at::Tensor& keys(int64_t layer) { return keys_[static_cast<size_t>(layer)]; }  // [pages, G, H, 16]
  at::Tensor& values(int64_t layer) {
    return values_[static_cast<size_t>(layer)];
  }  // [pages, G, 16, padded H]
  at::Device device() const { return device_; }
  at::ScalarType dtype() const { return dtype_; }
  int64_t num_layers() const { return static_cast<int64_t>(keys_.size()); }
  int64_t num_kv_heads() const { return num_kv_heads_; }
  int64_t head_dim() const { return head_dim_; }

 private:
  int64_t num_kv_heads_, head_dim_, max_pages_, num_pages_ = 0;
  at::ScalarType dtype_;
  at::Device device_;
  std::vector<at::Tensor> keys_, values_;
};

}  // namespace bough

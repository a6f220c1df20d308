// Keys and values in pages of kPageTokens tokens, for every layer, in the model's dtype on its device.
//
// Page p, layer l, head g: keys [padded H / P][16 tokens][P], then values [16 / P tokens][padded H][P], with P = 2 in
// bf16, whose dot products take pairs (of neighbours in h for keys, of tokens for values), else 1. H is padded with
// zeros to a multiple of kHeadPadding, so that loops over h need no tail. Slots that no token has been written to hold
// anything, NaN included: readers mask by length; but the first token of a page clears its values.
//
// Memory grows by doubling, up to `max_pages`, and is never given back: a steady state allocates nothing.
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

  static constexpr int64_t kHeadPadding = 32;  // the depth of a tile of bf16
  static int64_t padded_head_dim(int64_t head_dim) {
    return (head_dim + kHeadPadding - 1) / kHeadPadding * kHeadPadding;
  }
  static int64_t bytes_per_page(const ModelConfig& config, at::ScalarType dtype);

  // Room for pages 0 ... num_pages - 1; what the present ones hold is kept.
  void reserve(int64_t num_pages);
  // Copies whole pages, (from, to) each, in every layer.
  void copy_pages(std::span<const std::pair<int32_t, int32_t>> pairs);

  // Views: [pages, G, padded H / P, 16, P] and [pages, G, 16 / P, padded H, P]. A page's head is followed by the next
  // one's: strides of pages and heads are twice the elements.
  at::Tensor keys(int64_t layer) const;
  at::Tensor values(int64_t layer) const;
  int64_t pair_size() const { return dtype_ == at::kBFloat16 ? 2 : 1; }  // P
  int64_t num_layers() const { return static_cast<int64_t>(pages_.size()); }
  int64_t num_kv_heads() const { return num_kv_heads_; }
  int64_t head_dim() const { return head_dim_; }

 private:
  int64_t num_kv_heads_, head_dim_, max_pages_, num_pages_ = 0;
  at::ScalarType dtype_;
  at::Device device_;
  std::vector<at::Tensor> pages_;  // of each layer: [pages, G, 2, 16 * padded H]
};

}  // namespace bough

// Keys and values in pages of kPageTokens tokens, for every layer, in the model's dtype on its device.
//
// A layer's pages have the layout of paged attention (page_sizes() in
// kernels/paged_attention/paged_attention.h). Slots without a token hold arbitrary data, NaN included, so
// readers mask the scores beyond the length. The CPU kernel still multiplies the V vectors of masked slots by
// 0, and 0 * NaN is NaN. On the CPU, storing the first token of a page therefore sets the page's V vectors to
// 0.
//
// All memory is allocated at once and never moves, because captured CUDA graphs keep its addresses. On the
// CPU, pages that were never written take only address space.
//
// Under sparse attention, each layer except the dense ones also has summaries of blocks, by which they are
// chosen (kernels/page_choice/block_chooser.h). The pass that stores a block's last token writes its summary.
// If SparsePolicy::keeps_choices, a token's choices are stored beside its keys and values and copied with
// them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "data/trajectory.h"
#include "kernels/page_choice/block_chooser.h"
#include "models/config.h"
#include "rollout/page_pool.h"

namespace bough {

class KvStorage {
 public:
  // Throws UserError if the system refuses the memory for max_pages.
  KvStorage(const ModelConfig& config, at::ScalarType dtype, at::Device device, int64_t max_pages,
            const SparsePolicy& sparse = {});

  static int64_t bytes_per_page(const ModelConfig& config, at::ScalarType dtype,
                                const SparsePolicy& sparse = {}, at::Device device = at::kCPU);

  // Bytes of the page numbers that one token chose in all layers and heads; 0 if choices are not kept.
  static int64_t choice_bytes_per_token(const ModelConfig& config, const SparsePolicy& sparse);
  // Stores the numbers of the blocks that the queries of a pass chose in a layer.
  void keep_choices(int64_t layer, const BlockChooser& chooser, const BlockChooser::Lists& chosen);
  // Returns the blocks that the first `num_tokens` tokens of the sequence with the page table `pages` chose.
  // A token has choices only if it was sampled and its context has more pages than its budget.
  PageChoices kept_choices(std::span<const int32_t> pages, int64_t num_tokens,
                           const std::function<bool(int64_t)>& is_sampled) const;

  // Copies whole pages (from, to) in every layer.
  void copy_pages(std::span<const std::pair<int32_t, int32_t>> pairs);

  const at::Tensor& pages(int64_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  // The page summaries of a layer; an undefined tensor if the layer has none.
  const at::Tensor& summaries(int64_t layer) const { return summaries_[static_cast<size_t>(layer)]; }
  const SparsePolicy& sparse() const { return sparse_; }
  at::Device device() const { return device_; }
  at::ScalarType dtype() const { return dtype_; }
  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }
  int64_t num_kv_heads() const { return num_kv_heads_; }
  int64_t head_dim() const { return head_dim_; }

 private:
  int64_t page_dim() const { return device_.is_cuda() ? 1 : 0; }

  int64_t num_kv_heads_, head_dim_;
  at::ScalarType dtype_;
  at::Device device_;
  SparsePolicy sparse_;
  std::vector<at::Tensor> layers_, summaries_;
  at::Tensor choices_;  // int16 [B, 16, sparse layers, G, longest list] on the CPU, or undefined
};

}  // namespace bough

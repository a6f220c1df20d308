// Keys and values in pages of kPageTokens tokens, for every layer, in the model's dtype on its device.
//
// A layer's pages lie as paged attention takes them (page_sizes() in
// kernels/paged_attention/paged_attention.h). Slots that no token has been written to hold anything, NaN
// included: readers mask by length; but on the CPU the first token of a page clears its values.
//
// All of the memory is allocated at once and stays where it is (captured CUDA graphs keep its addresses). On
// the CPU pages that were never written take addresses only.
//
// Under sparse attention the pages of each layer but the dense ones have summaries beside them, by which they
// are chosen (kernels/page_choice/page_choice.h). A page's is written by the pass that stores its last token.
// Where the policy keeps choices, what a token chose lies beside its keys and values, and goes where they go.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "data/trajectory.h"
#include "kernels/page_choice/page_choice.h"
#include "models/config.h"
#include "rollout/page_pool.h"

namespace bough {

class KvStorage {
 public:
  // UserError where the system has no room for max_pages.
  KvStorage(const ModelConfig& config, at::ScalarType dtype, at::Device device, int64_t max_pages,
            const SparsePolicy& sparse = {});

  static int64_t bytes_per_page(const ModelConfig& config, at::ScalarType dtype,
                                const SparsePolicy& sparse = {});

  // Bytes of what a token chose: 0 where choices are not kept.
  static int64_t choice_bytes_per_token(const ModelConfig& config, const SparsePolicy& sparse);
  // Keeps what the queries of a pass chose in a layer.
  void keep_choices(int64_t layer, const PageChooser& chooser, const PageChooser::Lists& chosen);
  // What the first tokens of a sequence chose, those of them that were drawn and saw more than their budget.
  PageChoices kept_choices(std::span<const int32_t> pages, int64_t num_tokens,
                           const std::function<bool(int64_t)>& is_drawn) const;

  // Copies whole pages, (from, to) each, in every layer.
  void copy_pages(std::span<const std::pair<int32_t, int32_t>> pairs);

  const at::Tensor& pages(int64_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  // Undefined for a layer that attends to all.
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
  at::Tensor choices_;  // int16 [B, 16, layers that choose, G, most of a list] on the CPU, or undefined
};

}  // namespace bough

#include "kernels/tree_attention/tree_attention_paged.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "kernels/parameter.h"

namespace bough {

TreePages::TreePages(const at::Tensor& end_local, int64_t num_stack, int64_t num_kv_heads) {
  BOUGH_CHECK(end_local.is_cpu() && end_local.is_contiguous() && end_local.scalar_type() == at::kInt &&
                  num_stack >= 0 && num_stack <= end_local.numel(),
              "TreePages: end_local ", end_local.sizes(), " ", end_local.scalar_type(), ", ", num_stack,
              " keys on the stack");
  const auto* end = static_cast<const int32_t*>(end_local.const_data_ptr());
  const int64_t num_queries = end_local.numel() - num_stack;
  // The stack keys that the first query sees form one path. Every stack key that any other query sees is on
  // this path, too.
  for (int64_t j = 0; j < num_stack; ++j)
    if (end[j] > 0) append(static_cast<int32_t>(j));
  segment_begin_ = static_cast<int64_t>(path_.size());
  for (int64_t i = 0; i < num_queries; ++i) {
    size_t length = path_.size();
    while (length > 0 && end[path_[length - 1]] <= i) --length;
    if (length < path_.size()) {
      close_segment(static_cast<int64_t>(path_.size()));
      path_.resize(length);
      table_.resize(static_cast<size_t>(pages_for(static_cast<int64_t>(length))));
      segment_begin_ = static_cast<int64_t>(length);
    }
    append(static_cast<int32_t>(num_stack + i));
  }
  close_segment(static_cast<int64_t>(path_.size()));
  plan_ = PagedPlan(segments_, {.num_kv_heads = num_kv_heads});
  for (size_t slot = 0; slot < key_of_slot_.size(); ++slot) {
    const int32_t key = key_of_slot_[slot];
    if (key < 0) continue;
    if (key < num_stack) stack_slots_.push_back({key, static_cast<int64_t>(slot)});
    else own_slots_.push_back({key - num_stack, static_cast<int64_t>(slot)});
  }
}

void TreePages::append(int32_t key) {
  const size_t place = path_.size() % kPageTokens;
  const auto slots_of = [&](int32_t page) {
    return key_of_slot_.begin() + static_cast<int64_t>(page) * kPageTokens;
  };
  if (place == 0 || slots_of(table_.back())[static_cast<int64_t>(place)] >= 0) {
    const auto page = static_cast<int32_t>(num_pages());
    key_of_slot_.resize(key_of_slot_.size() + kPageTokens, -1);
    if (place > 0) {
      std::copy_n(slots_of(table_.back()), place, slots_of(page));
      table_.pop_back();
    }
    table_.push_back(page);
  }
  slots_of(table_.back())[static_cast<int64_t>(place)] = key;
  path_.push_back(key);
}

void TreePages::close_segment(int64_t end) {
  if (end == segment_begin_) return;
  tables_.push_back(table_);
  segments_.push_back({tables_.back(), segment_begin_, end - segment_begin_});
}

at::Tensor fill_pages(const TreeAttentionInput& in, const TreePages& pages) {
  at::Tensor layer_pages = at::empty(
      page_sizes({.num_kv_heads = in.k_TGH.size(1), .head_dim = in.k_TGH.size(2)}, pages.num_pages()),
      in.k_TGH.options());
  // The stack's keys are stored first, because storing the first key of a page clears the page's values. If
  // the first key of a page is a key of the pass, the page has no stack keys.
  store_in_pages(layer_pages, in.k_stack_PGH, in.v_stack_PGH, pages.stack_slots());
  store_in_pages(layer_pages, in.k_TGH, in.v_TGH, pages.own_slots());
  return layer_pages;
}

TreeAttentionOutput attend_to_pages(const TreeAttentionInput& in, const at::Tensor& layer_pages,
                                    const PagedPlan& plan) {
  auto lse_TN = at::empty({in.q_TNH.size(0), in.q_TNH.size(1)},
                          in.q_TNH.options().dtype(accumulator_type(in.q_TNH.scalar_type())));
  const auto o_TNH =
      paged_attention({.q_TNH = in.q_TNH, .pages = layer_pages, .plan = plan, .scale = in.scale}, &lse_TN);
  return {o_TNH, lse_TN};
}

TreeAttentionOutput tree_attention_forward_paged(const TreeAttentionInput& in, const TreePages& pages) {
  BOUGH_CHECK(in.q_TNH.is_cpu() && in.q_TNH.is_contiguous() && in.k_TGH.is_contiguous() &&
                  in.v_TGH.is_contiguous() && in.k_stack_PGH.is_contiguous() &&
                  in.v_stack_PGH.is_contiguous() &&
                  in.end_local.size(0) == in.k_stack_PGH.size(0) + in.q_TNH.size(0) &&
                  pages.plan().num_tokens() == in.q_TNH.size(0),
              "tree_attention_forward_paged: q ", in.q_TNH.sizes(), " on ", in.q_TNH.device().str(), ", k ",
              in.k_TGH.sizes(), ", k_stack ", in.k_stack_PGH.sizes(), ", pages of ",
              pages.plan().num_tokens(), " queries");
  return attend_to_pages(in, fill_pages(in, pages), pages.plan());
}

}  // namespace bough

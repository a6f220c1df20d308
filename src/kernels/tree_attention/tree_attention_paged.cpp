#include "kernels/tree_attention/tree_attention_paged.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

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
  // What the first query sees of the stack is one path: it holds all keys that any query sees.
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
  schedule_ = schedule_attention_for_threads(segments_, num_kv_heads);
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

namespace {
// Element: an unsigned integer as wide as an element.
template <class Element>
void fill_pages(const at::Tensor& keys, const at::Tensor& values, const TreeAttentionInput& in,
                const TreePages& pages) {
  const int64_t G = keys.size(1), H = keys.size(2), padded_H = values.size(3);
  const int64_t num_stack = in.k_stack_PGH.size(0);
  const auto data = [](const at::Tensor& x) { return static_cast<const Element*>(x.const_data_ptr()); };
  const Element *k_stack = data(in.k_stack_PGH), *v_stack = data(in.v_stack_PGH);
  const Element *k_own = data(in.k_TGH), *v_own = data(in.v_TGH);
  auto* key_pages = static_cast<Element*>(keys.mutable_data_ptr());
  auto* value_pages = static_cast<Element*>(values.mutable_data_ptr());
  at::parallel_for(0, pages.num_pages(), 4, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin * G; unit < end * G; ++unit) {
      const int32_t* key_of_slot = pages.key_of_slot().data() + unit / G * kPageTokens;
      Element* key_page = key_pages + unit * H * kPageTokens;
      Element* value_page = value_pages + unit * kPageTokens * padded_H;
      for (int64_t slot = 0; slot < kPageTokens && key_of_slot[slot] >= 0; ++slot) {
        const int64_t key = key_of_slot[slot];
        const bool on_stack = key < num_stack;
        const int64_t row = ((on_stack ? key : key - num_stack) * G + unit % G) * H;
        const Element *k = (on_stack ? k_stack : k_own) + row, *v = (on_stack ? v_stack : v_own) + row;
        for (int64_t h = 0; h < H; ++h) key_page[h * kPageTokens + slot] = k[h];
        std::memcpy(value_page + slot * padded_H, v, static_cast<size_t>(H) * sizeof(Element));
        std::memset(value_page + slot * padded_H + H, 0, static_cast<size_t>(padded_H - H) * sizeof(Element));
      }
    }
  });
}
}  // namespace

TreeAttentionOutput tree_attention_forward_paged(const TreeAttentionInput& in, const TreePages& pages) {
  const int64_t G = in.k_TGH.size(1), H = in.k_TGH.size(2);
  BOUGH_CHECK(in.q_TNH.is_cpu() && in.q_TNH.is_contiguous() && in.k_TGH.is_contiguous() &&
                  in.v_TGH.is_contiguous() && in.k_stack_PGH.is_contiguous() &&
                  in.v_stack_PGH.is_contiguous() &&
                  in.end_local.size(0) == in.k_stack_PGH.size(0) + in.q_TNH.size(0) &&
                  static_cast<int64_t>(pages.schedule().rows.size()) == in.q_TNH.size(0),
              "tree_attention_forward_paged: q ", in.q_TNH.sizes(), " on ", in.q_TNH.device().str(), ", k ",
              in.k_TGH.sizes(), ", k_stack ", in.k_stack_PGH.sizes(), ", pages of ",
              pages.schedule().rows.size(), " queries");
  const auto keys = at::empty({pages.num_pages(), G, H, kPageTokens}, in.k_TGH.options());
  const auto values = at::empty({pages.num_pages(), G, kPageTokens, padded_head_dim(H)}, in.k_TGH.options());
  switch (in.q_TNH.element_size()) {
    case 2: fill_pages<uint16_t>(keys, values, in, pages); break;
    case 4: fill_pages<uint32_t>(keys, values, in, pages); break;
    default: fill_pages<uint64_t>(keys, values, in, pages); break;
  }
  const auto lse_TN = at::empty({in.q_TNH.size(0), in.q_TNH.size(1)},
                                in.q_TNH.options().dtype(accumulator_type(in.q_TNH.scalar_type())));
  return {paged_attention(in.q_TNH, keys, values, pages.schedule(), in.scale, &lse_TN), lse_TN};
}

}  // namespace bough

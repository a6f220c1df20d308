#include "kernels/tree_attention/tree_attention_sparse.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "base/error.h"
#include "kernels/common/simd.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/page_choice/top_keys.h"
#include "kernels/parameter.h"
#include "kernels/tree_attention/tree_attention_sparse_cpu.h"

namespace bough {

namespace {
using simd::kLanes;
static_assert(kLanes == kPageTokens);

// The keys and values of one key/value head, page by page, and their gradients. padded H is H rounded up to a
// multiple of 16, with zeros from H on.
template <class Acc>
struct Head {
  int64_t padded_H = 0;
  std::vector<Acc> k_by_dim, v_by_dim;  // [pages][padded H][16]
  std::vector<Acc> k, d_k, d_v;         // [pages][16][padded H]
};

// A query of one query head. d_q is an output, all others are inputs.
template <class Acc>
struct Query {
  const Acc* q;    // [padded H]
  const Acc* d_o;  // [padded H]
  Acc lse, d, scale;
  const int32_t* pages;  // the page list of the query
  int64_t num_pages;
  unsigned last_keys;     // mask of the last page's visible keys
  const uint16_t* masks;  // masks of the pages; nullptr: all keys
  Acc* d_q;               // [padded H]
};

template <class Acc>
BOUGH_INLINE void visit_pages(Head<Acc>* head, const Query<Acc>* query) {
  using Vector = typename simd::Types<Acc>::Vector;
  const int64_t H = head->padded_H;
  for (int64_t i = 0; i < query->num_pages; ++i) {
    const int64_t at = query->pages[i] * kPageTokens * H;
    const Acc *k_by_dim = head->k_by_dim.data() + at, *v_by_dim = head->v_by_dim.data() + at;
    Vector scores = {}, d_weights = {};
    for (int64_t h = 0; h < H; ++h) {
      Vector k, v;
      simd::load(k, k_by_dim + h * kLanes);
      simd::load(v, v_by_dim + h * kLanes);
      scores += query->q[h] * k;
      d_weights += query->d_o[h] * v;
    }
    scores = scores * query->scale - query->lse;
    alignas(64) Acc weights[kLanes], d_scores[kLanes];
    simd::store(weights, scores);
    unsigned visible = i + 1 < query->num_pages ? unsigned{kAllKeys} : query->last_keys;
    if (query->masks) visible &= query->masks[i];
    for (int64_t j = 0; j < kLanes; ++j)  // invisible scores may have any value
      weights[j] = (visible >> j & 1) != 0 && weights[j] < 0 ? weights[j] : 0;
    simd::load(scores, weights);
    simd::exp_nonpositive(scores);
    const Vector d_score = scores * (d_weights - query->d) * query->scale;
    simd::store(weights, scores);
    simd::store(d_scores, d_score);
    for (int64_t j = 0; visible >> j != 0; ++j) {
      if ((visible >> j & 1) == 0) continue;
      const int64_t row = at + j * H;
      for (int64_t h = 0; h < H; h += kLanes) {
        Vector k, q, d_o, d_k, d_v, d_q;
        simd::load(k, head->k.data() + row + h);
        simd::load(q, query->q + h);
        simd::load(d_o, query->d_o + h);
        simd::load(d_k, head->d_k.data() + row + h);
        simd::load(d_v, head->d_v.data() + row + h);
        simd::load(d_q, query->d_q + h);
        d_k += d_scores[j] * q;
        d_v += weights[j] * d_o;
        d_q += d_scores[j] * k;
        simd::store(head->d_k.data() + row + h, d_k);
        simd::store(head->d_v.data() + row + h, d_v);
        simd::store(query->d_q + h, d_q);
      }
    }
  }
}

#define BOUGH_VISIT_PAGES(Acc) \
  BOUGH_ON_BEST_ISA(visit, (Head<Acc> * head, const Query<Acc>* query), (head, query), visit_pages<Acc>)
BOUGH_VISIT_PAGES(float)
BOUGH_VISIT_PAGES(double)

// The arguments of add_page_rows(). to: row of token 0, rows to_stride apart.
template <class Acc>
struct PageRows {
  const Acc* pages;
  int64_t stride;
  Acc factor;
  const TokenSlot* slots;
  int64_t num_slots;
  Acc* to;
  int64_t to_stride, H;
};

template <class Acc>
BOUGH_INLINE void add_rows_of(const PageRows<Acc>* of) {
  for (int64_t s = 0; s < of->num_slots; ++s) {
    Acc* const to = of->to + of->slots[s].token * of->to_stride;
    const Acc* const from = of->pages + of->slots[s].slot * of->stride;
    int64_t h = 0;
    for (; h + kLanes <= of->H; h += kLanes) {
      typename simd::Types<Acc>::Vector sum, x;
      simd::load(sum, to + h);
      simd::load(x, from + h);
      sum += of->factor * x;
      simd::store(to + h, sum);
    }
    for (; h < of->H; ++h) to[h] += of->factor * from[h];
  }
}

#define BOUGH_ADD_ROWS(Acc) BOUGH_ON_BEST_ISA(add_rows, (const PageRows<Acc>* of), (of), add_rows_of<Acc>)
BOUGH_ADD_ROWS(float)
BOUGH_ADD_ROWS(double)

// Copies the keys and values of one key/value head to their slots in the pages.
template <class T, class Acc>
void load_rows(const at::Tensor& k_TGH, const at::Tensor& v_TGH, std::span<const TokenSlot> slots, int64_t g,
               Head<Acc>& head) {
  const int64_t H = k_TGH.size(2), padded_H = head.padded_H;
  for (const TokenSlot& slot : slots) {
    const int64_t from = slot.token * k_TGH.size(1) * H + g * H;
    const int64_t page = slot.slot / kPageTokens, place = slot.slot % kPageTokens;
    for (int64_t h = 0; h < H; ++h) {
      const Acc k = simd::widen(data<T>(k_TGH)[from + h]), v = simd::widen(data<T>(v_TGH)[from + h]);
      head.k[static_cast<size_t>(slot.slot * padded_H + h)] = k;
      head.k_by_dim[static_cast<size_t>((page * padded_H + h) * kPageTokens + place)] = k;
      head.v_by_dim[static_cast<size_t>((page * padded_H + h) * kPageTokens + place)] = v;
    }
  }
}

template <class T>
void backward_head(const SparseBackward& of, int64_t g) {
  using Acc = AccOf<T>;
  const TreeAttentionInput& in = of.in;
  const int64_t N = in.q_TNH.size(1), G = in.k_TGH.size(1), H = in.q_TNH.size(2), heads = N / G;
  Head<Acc> head;
  head.padded_H = (H + kLanes - 1) / kLanes * kLanes;
  const auto size = static_cast<size_t>(of.pass.pages.num_pages() * kPageTokens * head.padded_H);
  for (auto* values : {&head.k_by_dim, &head.v_by_dim, &head.k, &head.d_k, &head.d_v}) values->resize(size);
  load_rows<T>(in.k_stack_PGH, in.v_stack_PGH, of.pass.pages.stack_slots(), g, head);
  load_rows<T>(in.k_TGH, in.v_TGH, of.pass.pages.own_slots(), g, head);
  const auto width = static_cast<size_t>(head.padded_H);
  std::vector<Acc> q(width), d_o(width), d_q(width);
  for_each_query(
      of, g,
      [&](int64_t token, int64_t position, std::span<const int32_t> pages, std::span<const uint16_t> masks) {
        for (int64_t n = g * heads; n < (g + 1) * heads; ++n) {
          const int64_t row = token * N + n;
          Acc product = 0;
          for (int64_t h = 0; h < H; ++h) {
            q[static_cast<size_t>(h)] = simd::widen(data<T>(in.q_TNH)[row * H + h]);
            d_o[static_cast<size_t>(h)] = simd::widen(data<T>(of.d_o_TNH)[row * H + h]);
            product += d_o[static_cast<size_t>(h)] * simd::widen(data<T>(of.out.o_TNH)[row * H + h]);
          }
          std::fill(d_q.begin(), d_q.end(), Acc{0});
          const Query<Acc> query{.q = q.data(),
                                 .d_o = d_o.data(),
                                 .lse = data<Acc>(of.out.lse_TN)[row],
                                 .d = product,
                                 .scale = static_cast<Acc>(in.scale),
                                 .pages = pages.data(),
                                 .num_pages = std::ssize(pages),
                                 .last_keys = (2u << position % kPageTokens) - 1,
                                 .masks = masks.empty() ? nullptr : masks.data(),
                                 .d_q = d_q.data()};
          visit(&head, &query);
          for (int64_t h = 0; h < H; ++h)
            simd::narrow(mutable_data<T>(of.d.d_q_TNH)[row * H + h], d_q[static_cast<size_t>(h)]);
        }
      });
  for (const auto& [sums, stack, own] : {std::tuple{&head.d_k, &of.d_k_stack_PGH, &of.d.d_k_TGH},
                                         std::tuple{&head.d_v, &of.d_v_stack_PGH, &of.d.d_v_TGH}}) {
    add_page_rows(sums->data(), head.padded_H, Acc{1}, of.pass.pages.stack_slots(), g, *stack);
    add_page_rows(sums->data(), head.padded_H, Acc{1}, of.pass.pages.own_slots(), g, *own);
  }
}

// The dense kernel computes the queries that attend to all keys; for it, d_o of the choosing queries is 0.
// top_keys_backward computes the choosing queries.
TreeAttentionGradient backward_of_top_keys(const TreeAttentionInput& in, const TreeAttentionOutput& out,
                                           const at::Tensor& d_o_TNH, const at::Tensor& d_k_stack_PGH,
                                           const at::Tensor& d_v_stack_PGH, const SparseTreePass& pass) {
  std::vector<int64_t> choosing;
  for (const ChoosingQuery& query : pass.chooser.queries()) choosing.push_back(query.token);
  const at::Tensor others_TNH = d_o_TNH.clone();
  others_TNH.index_fill_(0, at::tensor(choosing, at::kLong), 0);
  TreeAttentionGradient d = tree_attention_backward(in, out, others_TNH, d_k_stack_PGH, d_v_stack_PGH);
  const at::Tensor layer_pages = fill_pages(in, pass.pages);
  const at::Tensor d_k_SGH = at::zeros(
      {pass.pages.num_pages() * kPageTokens, in.k_TGH.size(1), in.k_TGH.size(2)}, d.d_k_TGH.options());
  const at::Tensor d_v_SGH = at::zeros_like(d_k_SGH);
  top_keys_backward(
      {in.q_TNH, layer_pages, pass.chooser.queries(), pass.chooser.policy().block_tokens, in.scale},
      out.o_TNH, out.lse_TN, d_o_TNH, d.d_q_TNH, d_k_SGH, d_v_SGH);
  const auto add = [&](std::span<const TokenSlot> slots, const at::Tensor& d_k_TGH,
                       const at::Tensor& d_v_TGH) {
    std::vector<int64_t> tokens, from;
    for (const TokenSlot& slot : slots) {
      tokens.push_back(slot.token);
      from.push_back(slot.slot);
    }
    const at::Tensor token_S = at::tensor(tokens, at::kLong), slot_S = at::tensor(from, at::kLong);
    d_k_TGH.index_add_(0, token_S, d_k_SGH.index_select(0, slot_S));
    d_v_TGH.index_add_(0, token_S, d_v_SGH.index_select(0, slot_S));
  };
  add(pass.pages.stack_slots(), d_k_stack_PGH, d_v_stack_PGH);
  add(pass.pages.own_slots(), d.d_k_TGH, d.d_v_TGH);
  return d;
}

}  // namespace

template <class Acc>
void add_page_rows(const Acc* pages, int64_t stride, Acc factor, std::span<const TokenSlot> slots, int64_t g,
                   const at::Tensor& d_TGH) {
  const int64_t H = d_TGH.size(2);
  const PageRows<Acc> of{.pages = pages,
                         .stride = stride,
                         .factor = factor,
                         .slots = slots.data(),
                         .num_slots = std::ssize(slots),
                         .to = mutable_data<Acc>(d_TGH) + g * H,
                         .to_stride = d_TGH.size(1) * H,
                         .H = H};
  add_rows(&of);
}
template void add_page_rows(const float*, int64_t, float, std::span<const TokenSlot>, int64_t,
                            const at::Tensor&);

BlockChooser::Lists choose_in_tree(const TreeAttentionInput& in, const at::Tensor& layer_pages,
                                   const SparseTreePass& pass) {
  const SparsePolicy& policy = pass.chooser.policy();
  if (policy.summary == BlockSummary::kExact) return {};
  const int64_t H = in.k_TGH.size(2);
  const at::Tensor summaries =
      at::empty(summary_sizes(policy, pass.pages.num_pages(), in.k_TGH.size(1), H), in.k_TGH.options());
  summarise_blocks(layer_pages, pass.chooser.complete(), policy, H, summaries);
  return pass.chooser.choose(in.q_TNH, summaries);
}

TreeAttentionOutput tree_attention_forward_sparse(const TreeAttentionInput& in, const at::Tensor& layer_pages,
                                                  const SparseTreePass& pass,
                                                  const BlockChooser::Lists& chosen) {
  if (pass.chooser.policy().summary == BlockSummary::kExact) {
    TreeAttentionOutput out = attend_to_pages(in, layer_pages, pass.pages.plan());
    attend_to_top_keys(
        {in.q_TNH, layer_pages, pass.chooser.queries(), pass.chooser.policy().block_tokens, in.scale},
        out.o_TNH, &out.lse_TN);
    return out;
  }
  const PagedShape shape{in.q_TNH.size(1), in.k_TGH.size(1), in.q_TNH.size(2), in.q_TNH.scalar_type(),
                         at::kCPU};
  const PageSelection selection = pass.chooser.selection(chosen);
  return attend_to_pages(in, layer_pages, PagedPlan(pass.chooser.segments(), shape, &selection));
}

TreeAttentionGradient tree_attention_backward_sparse(
    const TreeAttentionInput& in, const TreeAttentionOutput& out, const at::Tensor& d_o_TNH,
    const at::Tensor& d_k_stack_PGH, const at::Tensor& d_v_stack_PGH, const SparseTreePass& pass,
    const BlockChooser::Lists& chosen) {
  if (pass.chooser.policy().summary == BlockSummary::kExact)
    return backward_of_top_keys(in, out, d_o_TNH, d_k_stack_PGH, d_v_stack_PGH, pass);
  const auto acc = in.k_TGH.options().dtype(accumulator_type(in.k_TGH.scalar_type()));
  TreeAttentionGradient d{at::empty_like(in.q_TNH), at::zeros(in.k_TGH.sizes(), acc),
                          at::zeros(in.k_TGH.sizes(), acc)};
  BOUGH_CHECK(d_o_TNH.is_contiguous() && d_k_stack_PGH.is_contiguous() && d_v_stack_PGH.is_contiguous() &&
                  d_k_stack_PGH.scalar_type() == d.d_k_TGH.scalar_type() &&
                  d_v_stack_PGH.scalar_type() == d.d_k_TGH.scalar_type(),
              "tree_attention_backward_sparse: d_o ", d_o_TNH.sizes(), ", d_k_stack ", d_k_stack_PGH.sizes(),
              " ", d_k_stack_PGH.scalar_type(), ", d_v_stack ", d_v_stack_PGH.scalar_type());
  const SparseBackward of{in, out, d_o_TNH, d_k_stack_PGH, d_v_stack_PGH, pass, chosen, d};
  const auto for_each_head = [&](auto&& backward) {
    at::parallel_for(0, in.k_TGH.size(1), 1, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) backward(of, g);
    });
  };
  if (in.q_TNH.scalar_type() == at::kBFloat16 && has_tiles(at::kBFloat16)) {
    for_each_head(sparse_backward_head_bf16);
    return d;
  }
  dispatch_float_types(in.q_TNH.scalar_type(), "tree attention",
                       [&]<class T>() { for_each_head(backward_head<T>); });
  return d;
}

}  // namespace bough

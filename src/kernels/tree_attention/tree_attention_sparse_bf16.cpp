// Backward over chosen blocks by bf16 tiles, for one key/value head. The queries that attend to a page need
// not be consecutive, so they are gathered. A query row is one query of one query head of the key/value head;
// the heads of a query are adjacent. For each page of 16 keys and 32 query rows:
//   S = Q·Kᵀ, dP = dO·Vᵀ, P and dS; dQ = dS·K, added to the rows of d_q; dV += Pᵀ·dO, dK += dSᵀ·Q
// Q and dO are left factors as they lie in memory, K and V are packed once a page. The precision equals that
// of tree_attention_bf16_backward.cpp.
#include <array>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/common/simd.h"
#include "kernels/tree_attention/tree_attention_bf16.h"
#include "kernels/tree_attention/tree_attention_sparse_cpu.h"

namespace bough {

namespace bf16 {
namespace {
static_assert(kUnit == 2 * kPageTokens && kLanes == kPageTokens);
constexpr int64_t kBlocks = 8;  // blocks of 32 query rows between two updates of a page's sums
constexpr int64_t kPageUnit = kPageTokens * kUnit;  // elements of a left factor [16 keys][32 queries]

// A query that attends to a page, and which of the page's keys it sees: bit j for key j.
struct Visit {
  int64_t token;
  uint16_t visible;
};
// The visits of page p are visits[begin[p]] to visits[begin[p + 1] - 1], in the order of the queries.
struct Visits {
  std::vector<size_t> begin;
  std::vector<Visit> visits;
};

Visits visits_of(const SparseBackward& of, int64_t g) {
  Visits visits;
  visits.begin.assign(static_cast<size_t>(of.pass.pages.num_pages()) + 1, 0);
  for_each_query(of, g, [&](int64_t, int64_t, std::span<const int32_t> pages, std::span<const uint16_t>) {
    for (const int32_t page : pages) ++visits.begin[static_cast<size_t>(page) + 1];
  });
  std::partial_sum(visits.begin.begin(), visits.begin.end(), visits.begin.begin());
  visits.visits.resize(visits.begin.back());
  std::vector<size_t> next(visits.begin.begin(), visits.begin.end() - 1);
  for_each_query(
      of, g,
      [&](int64_t token, int64_t position, std::span<const int32_t> pages, std::span<const uint16_t> masks) {
        for (size_t i = 0; i < pages.size(); ++i) {
          uint32_t visible = masks.empty() ? kAllKeys : masks[i];
          if (i + 1 == pages.size()) visible &= (2u << position % kPageTokens) - 1;
          visits.visits[next[static_cast<size_t>(pages[i])]++] = {token, static_cast<uint16_t>(visible)};
        }
      });
  return visits;
}

class HeadBackward {
 public:
  HeadBackward(const SparseBackward& of, int64_t g)
      : of_(of),
        g_(g),
        heads_(of.in.q_TNH.size(1) / of.in.k_TGH.size(1)),
        head_dim_(of.in.q_TNH.size(2)),
        width_(rounded_up(head_dim_, kUnit)),
        elements_(kUnit * width_),
        num_rows_(of.in.q_TNH.size(0) * heads_),
        num_keys_(of.pass.pages.num_pages() * kPageTokens),
        scale_(static_cast<float>(of.in.scale)),
        keys_(2 * num_keys_ * width_),
        k_(keys_.get()),
        v_(k_ + num_keys_ * width_),
        key_sums_(2 * num_keys_ * width_),
        d_k_(key_sums_.get()),
        d_v_(d_k_ + num_keys_ * width_),
        queries_(num_rows_ * 2 * width_),
        d_q_(num_rows_ * width_),
        of_rows_(2 * num_rows_),
        lse_(of_rows_.get()),
        dots_(lse_ + num_rows_),
        sums_(elements_ + 2 * kPageUnit),
        factors_((5 + 2 * kBlocks) * elements_ + 2 * kBlocks * kPageUnit + kUnitElements) {}

  void run() {
    std::fill_n(d_q_.get(), num_rows_ * width_, 0.0f);
    std::fill_n(key_sums_.get(), 2 * num_keys_ * width_, 0.0f);
    std::fill_n(keys_.get(), 2 * num_keys_ * width_, Element{});
    std::fill_n(d_s(), kUnitElements, Element{});
    load_keys(of_.in.k_stack_PGH, of_.in.v_stack_PGH, of_.pass.pages.stack_slots());
    load_keys(of_.in.k_TGH, of_.in.v_TGH, of_.pass.pages.own_slots());
    load_queries();
    const Visits visits = visits_of(of_, g_);
    for (int64_t page = 0; page < of_.pass.pages.num_pages(); ++page) {
      const auto p = static_cast<size_t>(page);
      visit(page, std::span(visits.visits).subspan(visits.begin[p], visits.begin[p + 1] - visits.begin[p]));
    }
    store();
  }

 private:
  // Up to 32 query rows. The number of a query row is token · heads + head.
  struct Block {
    int64_t count = 0;
    std::array<int64_t, kUnit> rows;
    std::array<uint16_t, kUnit> visible;
  };

  // Scratch buffers: the float buffers follow each other in `sums_`, the Element buffers in `factors_`.
  float* d_q_block() const { return sums_.get(); }           // [32 queries][width]
  float* scores() const { return d_q_block() + elements_; }  // [32 queries][16 keys]
  float* d_p() const { return scores() + kPageUnit; }        // same shape

  Element* k_columns() const { return factors_.get(); }  // right factors [width, 16 keys]
  Element* v_columns() const { return k_columns() + elements_; }
  Element* k_rows() const { return v_columns() + elements_; }     // right factors [16 keys, width]
  Element* gathered() const { return k_rows() + elements_; }      // [32][q, d_o][width]
  Element* q_rows() const { return gathered() + 2 * elements_; }  // right factors [blocks][32, width]
  Element* d_o_rows() const { return q_rows() + kBlocks * elements_; }
  Element* p_turned() const { return d_o_rows() + kBlocks * elements_; }  // left factors [blocks][16, 32]
  Element* d_s_turned() const { return p_turned() + kBlocks * kPageUnit; }
  Element* d_s() const { return d_s_turned() + kBlocks * kPageUnit; }  // left factor [32, 32]

  int64_t offset_of(int64_t row) const {  // in elements of q, o and d_o
    return ((row / heads_) * of_.in.q_TNH.size(1) + g_ * heads_ + row % heads_) * head_dim_;
  }

  void load_keys(const at::Tensor& k_TGH, const at::Tensor& v_TGH, std::span<const TokenSlot> slots) const {
    for (const TokenSlot& slot : slots) {
      const int64_t from = (slot.token * k_TGH.size(1) + g_) * head_dim_;
      const auto bytes = static_cast<size_t>(head_dim_) * sizeof(Element);
      std::memcpy(k_ + slot.slot * width_, data<Element>(k_TGH) + from, bytes);
      std::memcpy(v_ + slot.slot * width_, data<Element>(v_TGH) + from, bytes);
    }
  }

  // The q and d_o that are gathered for one query row lie next to each other.
  void load_queries() const {
    std::fill_n(queries_.get(), num_rows_ * 2 * width_, Element{});
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t at = offset_of(row);
      Element* const to = queries_.get() + row * 2 * width_;
      std::copy_n(data<Element>(of_.in.q_TNH) + at, head_dim_, to);
      std::copy_n(data<Element>(of_.d_o_TNH) + at, head_dim_, to + width_);
      lse_[row] = data<float>(of_.out.lse_TN)[at / head_dim_] * kLog2E;
      row_dots(dots_ + row, data<Element>(of_.d_o_TNH) + at, data<Element>(of_.out.o_TNH) + at, 1, head_dim_,
               head_dim_);
    }
  }

  void visit(int64_t page, std::span<const Visit> visits) const {
    if (visits.empty()) return;
    const Element *k = k_ + page * kPageTokens * width_, *v = v_ + page * kPageTokens * width_;
    pack_panel(k_columns(), k, width_, true, width_, kPageTokens);
    pack_panel(v_columns(), v, width_, true, width_, kPageTokens);
    for (int64_t column = 0; column < width_; column += kUnit)
      pack_panel(k_rows() + column * kUnit, k + column, width_, false, kPageTokens, kUnit);
    Block block;
    int64_t num_blocks = 0;
    const auto flush = [&] {
      compute(block, num_blocks++);
      block.count = 0;
      if (num_blocks < kBlocks) return;
      add_to_keys(page, num_blocks);
      num_blocks = 0;
    };
    for (const Visit& visit : visits)
      for (int64_t head = 0; head < heads_; ++head) {
        const auto i = static_cast<size_t>(block.count++);
        block.rows[i] = visit.token * heads_ + head;
        block.visible[i] = visit.visible;
        if (block.count == kUnit) flush();
      }
    if (block.count > 0) flush();
    if (num_blocks > 0) add_to_keys(page, num_blocks);
  }

  // Computes Pᵀ and dSᵀ of the rows of a block and the current page, and adds the products dS·K to d_q. slot:
  // which of the kBlocks buffers keeps Pᵀ, dSᵀ, Q and dO until add_to_keys().
  void compute(const Block& block, int64_t slot) const {
    Element *const q = gathered(), *const d_o = q + width_;
    const int64_t stride = 2 * width_;
    std::array<uint16_t, kUnit> visible{};
    std::array<float, kUnit> lse{}, dots{};
    std::array<float*, kUnit> d_q;
    for (size_t i = 0; i < static_cast<size_t>(block.count); ++i) {
      const int64_t row = block.rows[i];
      std::memcpy(q + static_cast<int64_t>(i) * stride, queries_.get() + row * stride,
                  static_cast<size_t>(stride) * sizeof(Element));
      visible[i] = block.visible[i];
      lse[i] = lse_[row];
      dots[i] = dots_[row];
      d_q[i] = d_q_.get() + row * width_;
    }
    std::fill_n(q + block.count * stride, (kUnit - block.count) * stride, Element{});
    for (int64_t column = 0; column < width_; column += kUnit) {
      const int64_t columns = std::min(kUnit, head_dim_ - column);
      pack_panel(q_rows() + slot * elements_ + column * kUnit, q + column, stride, false, kUnit, columns);
      pack_panel(d_o_rows() + slot * elements_ + column * kUnit, d_o + column, stride, false, kUnit, columns);
    }
    multiply_block(scores(), kPageTokens, false, q, stride, false, k_columns(), kPageTokens, width_);
    multiply_block(d_p(), kPageTokens, false, d_o, stride, false, v_columns(), kPageTokens, width_);
    softmax_backward_page(scores(), d_p(), visible.data(), scale_ * kLog2E, lse.data(), dots.data(), d_s(),
                          p_turned() + slot * kPageUnit, d_s_turned() + slot * kPageUnit);
    for (int64_t column = 0; column < width_; column += kUnit)
      multiply_block(d_q_block() + column, width_, false, d_s(), 0, true, k_rows() + column * kUnit, kUnit,
                     kUnit);
    add_rows(d_q_block(), d_q.data(), block.count, width_);
  }

  void add_to_keys(int64_t page, int64_t num_blocks) const {
    std::array<const Element*, kBlocks> left{}, right{};
    const auto add = [&](float* sums, const Element* factor, const Element* rows) {
      for (int64_t column = 0; column < width_; column += kUnit) {
        for (int64_t b = 0; b < num_blocks; ++b) {
          left[static_cast<size_t>(b)] = factor + b * kPageUnit;
          right[static_cast<size_t>(b)] = rows + b * elements_ + column * kUnit;
        }
        add_products(sums + page * kPageTokens * width_ + column, width_, left.data(), right.data(),
                     num_blocks, kPageTokens);
      }
    };
    add(d_v_, p_turned(), d_o_rows());
    add(d_k_, d_s_turned(), q_rows());
  }

  void store() const {
    for (int64_t row = 0; row < num_rows_; ++row)
      store_row(d_q_.get() + row * width_, scale_, mutable_data<Element>(of_.d.d_q_TNH) + offset_of(row),
                head_dim_);
    const TreePages& pages = of_.pass.pages;
    add_page_rows(d_k_, width_, scale_, pages.stack_slots(), g_, of_.d_k_stack_PGH);
    add_page_rows(d_k_, width_, scale_, pages.own_slots(), g_, of_.d.d_k_TGH);
    add_page_rows(d_v_, width_, 1.0f, pages.stack_slots(), g_, of_.d_v_stack_PGH);
    add_page_rows(d_v_, width_, 1.0f, pages.own_slots(), g_, of_.d.d_v_TGH);
  }

  const SparseBackward& of_;
  const int64_t g_, heads_, head_dim_, width_;  // width_: head_dim_, padded
  const int64_t elements_;                      // elements of a factor of 32 rows
  const int64_t num_rows_, num_keys_;
  const float scale_;
  const AlignedBuffer<Element> keys_;
  Element *const k_, *const v_;  // [pages · 16][width]
  const AlignedBuffer<float> key_sums_;
  float *const d_k_, *const d_v_;         // same shape
  const AlignedBuffer<Element> queries_;  // [rows][q, d_o][width]
  const AlignedBuffer<float> d_q_;        // [rows][width]
  const AlignedBuffer<float> of_rows_;
  float *const lse_, *const dots_;  // [rows]; lse to base 2
  const AlignedBuffer<float> sums_;
  const AlignedBuffer<Element> factors_;
};

}  // namespace
}  // namespace bf16

void sparse_backward_head_bf16(const SparseBackward& of, int64_t g) {
  const bf16::Session session{};
  bf16::HeadBackward(of, g).run();
}

}  // namespace bough

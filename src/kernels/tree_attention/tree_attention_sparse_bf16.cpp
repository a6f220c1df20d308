// Backward over chosen blocks by bf16 tiles, for one key/value head. The queries that attend to a page need
// not be consecutive, so they are gathered. A query row is one query of one query head of the key/value head;
// the heads of a query are adjacent. For each page and 32 query rows:
//   Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, Pᵀ and dSᵀ, dV += Pᵀ·dO, dK += dSᵀ·Q, dQᵀ = Kᵀ·dSᵀ, added to the rows of d_q
// A page has 16 keys, a tile 32. The other 16 are computed and masked. The precision equals that of
// tree_attention_bf16_backward.cpp.
#include <array>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/common/simd.h"
#include "kernels/tree_attention/tree_attention_bf16.h"
#include "kernels/tree_attention/tree_attention_sparse_cpu.h"

namespace bough {

namespace bf16 {
namespace {
static_assert(kUnit == 2 * kPageTokens);
constexpr int64_t kBlocks = 8;  // blocks of 32 query rows between two updates of a page's sums
constexpr int32_t kEver = std::numeric_limits<int32_t>::max();

// The ends (UnitMask) of a tile's 32 keys: `count` keys of the page from `first` on are visible.
constexpr std::array<int32_t, kUnit> ends_of(int64_t first, int64_t count) {
  std::array<int32_t, kUnit> ends{};
  for (int64_t j = first; j < first + count; ++j) ends[static_cast<size_t>(j)] = kEver;
  return ends;
}

// Up to 32 query rows. The number of a query row is token · heads + head; -1 marks an unused element.
using QueryRows = std::array<int64_t, kUnit>;

// `rows` and `begin` list for each part of a page (SparsePolicy) the query rows that see all its keys. `own`
// lists for each page the queries whose own key is in the page.
struct Visits {
  std::vector<int64_t> begin;  // [parts + 1], into rows
  std::vector<int64_t> rows;   // by part, ascending
  std::vector<int64_t> own;    // [pages][16]: the query token of the pass at this place, or -1
};

Visits visits_of(const SparseBackward& of, int64_t g, int64_t heads) {
  const auto num_pages = static_cast<size_t>(of.pass.pages.num_pages());
  const SparsePolicy& policy = of.pass.chooser.policy();
  const int64_t parts_per_page = policy.parts_per_page(), part_tokens = policy.part_tokens();
  Visits visits;
  visits.begin.assign(num_pages * static_cast<size_t>(parts_per_page) + 1, 0);
  visits.own.assign(num_pages * kPageTokens, -1);
  const auto for_each_visit = [&](auto&& visit) {
    for_each_query(of, g,
                   [&](int64_t token, int64_t position, std::span<const int32_t> pages,
                       std::span<const uint16_t> masks) {
                     const int64_t place = position % kPageTokens;
                     for (size_t i = 0; i < pages.size(); ++i) {
                       // The query sees the part that has its own key only up to this key.
                       const int64_t end = i + 1 < pages.size() ? parts_per_page : place / part_tokens;
                       for (int64_t part = 0; part < end; ++part)
                         if (masks.empty() || (masks[i] >> part * part_tokens & 1) != 0)
                           visit(token, static_cast<size_t>(pages[i] * parts_per_page + part));
                     }
                     visits.own[static_cast<size_t>(pages.back() * kPageTokens + place)] = token;
                   });
  };
  for_each_visit([&](int64_t, size_t part) { visits.begin[part + 1] += heads; });
  std::partial_sum(visits.begin.begin(), visits.begin.end(), visits.begin.begin());
  visits.rows.resize(static_cast<size_t>(visits.begin.back()));
  std::vector<int64_t> next(visits.begin.begin(), visits.begin.end() - 1);
  for_each_visit([&](int64_t token, size_t part) {
    for (int64_t head = 0; head < heads; ++head)
      visits.rows[static_cast<size_t>(next[part]++)] = token * heads + head;
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
        parts_per_page_(of.pass.chooser.policy().parts_per_page()),
        part_tokens_(of.pass.chooser.policy().part_tokens()),
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
        sums_(3 * elements_ + 2 * kUnitElements + 2 * kUnit),
        factors_((7 + 2 * kBlocks) * elements_ + (2 * kBlocks + 1) * kUnitElements) {}

  void run() {
    std::fill_n(d_q_.get(), num_rows_ * width_, 0.0f);
    std::fill_n(k_, 2 * num_keys_ * width_, Element{});
    load_keys(of_.in.k_stack_PGH, of_.in.v_stack_PGH, of_.pass.pages.stack_slots());
    load_keys(of_.in.k_TGH, of_.in.v_TGH, of_.pass.pages.own_slots());
    load_queries();
    const Visits visits = visits_of(of_, g_, heads_);
    for (int64_t page = 0; page < of_.pass.pages.num_pages(); ++page) visit(visits, page);
    store();
  }

 private:
  // Scratch buffers: the float buffers follow each other in `sums_`, the Element buffers in `factors_`.
  float* d_k_unit() const { return sums_.get(); }              // [32][width]
  float* d_v_unit() const { return d_k_unit() + elements_; }   // [32][width]
  float* scores() const { return d_v_unit() + elements_; }     // [32 keys][32 queries]
  float* d_p() const { return scores() + kUnitElements; }      // same shape
  float* d_q_turned() const { return d_p() + kUnitElements; }  // [width][32 queries]
  float* lse_block() const { return d_q_turned() + elements_; }
  float* dots_block() const { return lse_block() + kUnit; }

  Element* k_unit() const { return factors_.get(); }  // left factors [32, width]
  Element* v_unit() const { return k_unit() + elements_; }
  Element* k_turned() const { return v_unit() + elements_; }    // left factors [width/32][32 of width, 32]
  Element* q_turned() const { return k_turned() + elements_; }  // right factors [width, 32]
  Element* d_o_turned() const { return q_turned() + elements_; }
  Element* q_rows() const { return d_o_turned() + elements_; }  // right factors [blocks][32, width]
  Element* d_o_rows() const { return q_rows() + kBlocks * elements_; }
  Element* p() const { return d_o_rows() + kBlocks * elements_; }  // left factors [blocks][32, 32]
  Element* d_s() const { return p() + kBlocks * kUnitElements; }
  Element* d_s_right() const { return d_s() + kBlocks * kUnitElements; }  // a right factor [32, 32]
  Element* gathered() const { return d_s_right() + kUnitElements; }       // [32][q, d_o][width]

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

  void visit(const Visits& visits, int64_t page) const {
    const int64_t *begin = visits.begin.data() + page * parts_per_page_,
                  *own = visits.own.data() + page * kPageTokens;
    const bool is_own = std::any_of(own, own + kPageTokens, [](int64_t token) { return token >= 0; });
    if (begin[0] == begin[parts_per_page_] && !is_own) {
      for (float* sums : {d_k_, d_v_})
        std::fill_n(sums + page * kPageTokens * width_, kPageTokens * width_, 0.0f);
      return;
    }
    const Element *k = k_ + page * kPageTokens * width_, *v = v_ + page * kPageTokens * width_;
    pack_block(k_unit(), k, width_, false, kPageTokens, width_);
    pack_block(v_unit(), v, width_, false, kPageTokens, width_);
    for (int64_t column = 0; column < width_; column += kUnit)
      pack_block(k_turned() + column * kUnit, k + column, width_, true, kUnit, kPageTokens);
    std::fill_n(d_k_unit(), 2 * elements_, 0.0f);
    int64_t num_blocks = 0;
    const auto add = [&](const QueryRows& rows, const UnitMask& mask) {
      block(rows, mask, num_blocks++);
      if (num_blocks < kBlocks) return;
      add_to_keys(num_blocks);
      num_blocks = 0;
    };
    for (int64_t part = 0; part < parts_per_page_; ++part) {
      const int64_t first = part * part_tokens_;
      alignas(64) const std::array<int32_t, kUnit> ends = ends_of(first, part_tokens_);
      for (int64_t row = begin[part]; row < begin[part + 1]; row += kUnit) {
        QueryRows rows;
        rows.fill(-1);
        std::copy_n(visits.rows.begin() + row, std::min(kUnit, begin[part + 1] - row), rows.begin());
        add(rows, {ends.data(), kUnit, 0});
      }
      for (int64_t head = 0; is_own && head < heads_; ++head) {
        QueryRows rows;
        rows.fill(-1);
        for (int64_t place = first; place < first + part_tokens_; ++place)
          if (own[place] >= 0) rows[static_cast<size_t>(place)] = own[place] * heads_ + head;
        if (std::any_of(rows.begin(), rows.end(), [](int64_t row) { return row >= 0; }))
          add(rows, {ends.data(), 0, 0});
      }
    }
    if (num_blocks > 0) add_to_keys(num_blocks);
    std::copy_n(d_k_unit(), kPageTokens * width_, d_k_ + page * kPageTokens * width_);
    std::copy_n(d_v_unit(), kPageTokens * width_, d_v_ + page * kPageTokens * width_);
  }

  // Computes Pᵀ and dSᵀ of 32 query rows and the current page, and adds the products Kᵀ·dSᵀ to d_q. slot:
  // which of the kBlocks buffers keeps Pᵀ and dSᵀ until add_to_keys().
  void block(const QueryRows& rows, const UnitMask& mask, int64_t slot) const {
    Element *const q = gathered(), *const d_o = q + width_;
    const int64_t stride = 2 * width_;
    std::array<float*, kUnit> d_q{};
    int64_t num_rows = 0;
    for (size_t i = 0; i < kUnit; ++i) {
      const int64_t row = rows[i];
      Element* const to = q + static_cast<int64_t>(i) * stride;
      if (row < 0) {
        std::fill_n(to, stride, Element{});
        lse_block()[i] = std::numeric_limits<float>::max();  // probabilities of 0
        dots_block()[i] = 0;
        d_q[i] = unused_.get();
        continue;
      }
      std::memcpy(to, queries_.get() + row * stride, static_cast<size_t>(stride) * sizeof(Element));
      lse_block()[i] = lse_[row];
      dots_block()[i] = dots_[row];
      d_q[i] = d_q_.get() + row * width_;
      num_rows = static_cast<int64_t>(i) + 1;
    }
    pack_panel(q_turned(), q, stride, true, head_dim_, kUnit);
    pack_panel(d_o_turned(), d_o, stride, true, head_dim_, kUnit);
    for (int64_t column = 0; column < width_; column += kUnit) {
      const int64_t columns = std::min(kUnit, head_dim_ - column);
      pack_panel(q_rows() + slot * elements_ + column * kUnit, q + column, stride, false, kUnit, columns);
      pack_panel(d_o_rows() + slot * elements_ + column * kUnit, d_o + column, stride, false, kUnit, columns);
    }
    multiply_block(scores(), kUnit, false, k_unit(), 0, true, q_turned(), kUnit, width_);
    multiply_block(d_p(), kUnit, false, v_unit(), 0, true, d_o_turned(), kUnit, width_);
    softmax_backward_unit(scores(), d_p(), mask, scale_ * kLog2E, lse_block(), dots_block(),
                          p() + slot * kUnitElements, d_s() + slot * kUnitElements, d_s_right());
    for (int64_t column = 0; column < width_; column += kUnit)
      multiply_block(d_q_turned() + column * kUnit, kUnit, false, k_turned() + column * kUnit, 0, true,
                     d_s_right(), kUnit, kUnit);
    add_turned(d_q_turned(), d_q.data(), num_rows, width_);
  }

  void add_to_keys(int64_t num_blocks) const {
    std::array<const Element*, kBlocks> left{}, right{};
    const auto add = [&](float* sums, const Element* factor, const Element* rows) {
      for (int64_t column = 0; column < width_; column += kUnit) {
        for (int64_t b = 0; b < num_blocks; ++b) {
          left[static_cast<size_t>(b)] = factor + b * kUnitElements;
          right[static_cast<size_t>(b)] = rows + b * elements_ + column * kUnit;
        }
        add_products(sums + column, width_, left.data(), right.data(), num_blocks);
      }
    };
    add(d_v_unit(), p(), d_o_rows());
    add(d_k_unit(), d_s(), q_rows());
  }

  void store() const {
    for (int64_t row = 0; row < num_rows_; ++row)
      for (int64_t h = 0; h < head_dim_; ++h)
        simd::narrow(mutable_data<Element>(of_.d.d_q_TNH)[offset_of(row) + h],
                     scale_ * d_q_.get()[row * width_ + h]);
    const TreePages& pages = of_.pass.pages;
    add_page_rows(d_k_, width_, scale_, pages.stack_slots(), g_, of_.d_k_stack_PGH);
    add_page_rows(d_k_, width_, scale_, pages.own_slots(), g_, of_.d.d_k_TGH);
    add_page_rows(d_v_, width_, 1.0f, pages.stack_slots(), g_, of_.d_v_stack_PGH);
    add_page_rows(d_v_, width_, 1.0f, pages.own_slots(), g_, of_.d.d_v_TGH);
  }

  const SparseBackward& of_;
  const int64_t g_, heads_, head_dim_, width_;  // width_: head_dim_, padded
  const int64_t elements_;                      // elements of a factor of 32 rows
  const int64_t parts_per_page_, part_tokens_;  // SparsePolicy
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
  const AlignedBuffer<float> unused_{width_};  // receives the gradients of padding rows
};

}  // namespace
}  // namespace bf16

void sparse_backward_head_bf16(const SparseBackward& of, int64_t g) {
  const bf16::Session session{};
  bf16::HeadBackward(of, g).run();
}

}  // namespace bough

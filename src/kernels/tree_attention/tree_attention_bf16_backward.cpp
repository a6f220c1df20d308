// For each 4 units of keys and each query head that reads them, 8 blocks of queries at a time:
//   Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, Pᵀ and dSᵀ, dV += Pᵀ·dO, dK += dSᵀ·Q, dQᵀ += Kᵀ·dSᵀ
// Scores are transposed, so that Pᵀ and dSᵀ are written directly as the left factors of dV and dK. dSᵀ is
// also written as the right factor of dQᵀ. Units and blocks of queries: tree_attention_units.h.
#include <array>
#include <limits>

#include "kernels/tree_attention/tree_attention_bf16.h"

namespace bough {

namespace bf16 {
namespace {
constexpr int64_t kBackwardUnits = kBf16BackwardUnits;
constexpr int64_t kBackwardBlocks = 8;  // blocks of queries between two updates of dV and dK

// A block of queries of one head, in the layouts that the backward products read.
struct QueryBlock {
  Element *q, *q_turned, *d_o, *d_o_turned;  // right factors: [32, H] and [H, 32] of q, then of d_o
  float *lse, *dots;                         // [32]; lse to base 2
};

class QueryBlocks {
 public:
  explicit QueryBlocks(const Inputs& x)
      : elements_(x.factor_elements()),
        per_head_(x.num_blocks()),
        factors_(x.shape.num_heads * per_head_ * kQueryLayouts * elements_),
        scalars_(x.shape.num_heads * per_head_ * kQueryScalars * kUnit) {}

  QueryBlock block(int64_t head, int64_t index) const {
    const int64_t i = head * per_head_ + index;
    Element* q = factors_.get() + i * kQueryLayouts * elements_;
    float* lse = scalars_.get() + i * kQueryScalars * kUnit;
    return {q, q + elements_, q + 2 * elements_, q + 3 * elements_, lse, lse + kUnit};
  }

  void load(const Inputs& x, int64_t head, int64_t index, const Element* d_o, const Element* o,
            const float* lse) const {
    const auto& shape = x.shape;
    const QueryBlock b = block(head, index);
    const Range queries = block_queries(shape, index);
    const int64_t count = queries.size(), stride = shape.q_stride();
    const int64_t offset = queries.begin * stride + head * shape.head_dim;
    const Element* q = data<Element>(x.in.q_TNH) + offset;
    pack_rows(b.q, x, q, stride, count);
    pack_panel(b.q_turned, q, stride, true, shape.head_dim, count);
    pack_rows(b.d_o, x, d_o + offset, stride, count);
    pack_panel(b.d_o_turned, d_o + offset, stride, true, shape.head_dim, count);
    row_dots(b.dots, d_o + offset, o + offset, count, stride, shape.head_dim);
    for (int64_t i = 0; i < count; ++i) b.lse[i] = lse[(queries.begin + i) * shape.num_heads + head] * kLog2E;
    // Padding rows get probabilities of 0.
    std::fill(b.lse + count, b.lse + kUnit, std::numeric_limits<float>::max());
    std::fill(b.dots + count, b.dots + kUnit, 0.0f);
  }

 private:
  int64_t elements_, per_head_;
  Workspace<Element> factors_;
  Workspace<float> scalars_;
};

// The scratch of one thread for up to kBackwardUnits units of keys.
struct BackwardScratch {
  explicit BackwardScratch(int64_t elements)
      : sums(2 * kBackwardUnits * elements + 2 * kUnitElements),
        factors(3 * kBackwardUnits * elements + (2 + kBackwardUnits) * kBackwardBlocks * kUnitElements),
        d_k(sums.get()),
        d_v(d_k + kBackwardUnits * elements),
        scores(d_v + kBackwardUnits * elements),
        d_p(scores + kUnitElements),
        k(factors.get()),
        v(k + kBackwardUnits * elements),
        k_turned(v + kBackwardUnits * elements),
        p(k_turned + kBackwardUnits * elements),
        d_s(p + kBackwardBlocks * kUnitElements),
        d_s_right(d_s + kBackwardBlocks * kUnitElements) {}

  AlignedBuffer<float> sums;
  AlignedBuffer<Element> factors;
  float *d_k, *d_v;     // [units][32][width]
  float *scores, *d_p;  // one unit, transposed
  Element *k, *v;       // left factors [units][32, H]
  Element* k_turned;    // left factors [units][width/32][32 of H, 32]
  Element *p, *d_s;     // left factors [blocks][32 keys, 32 queries]
  Element* d_s_right;   // right factors [blocks][units][32 keys, 32 queries]
};

// Computes d_k and d_v of up to kBackwardUnits units of keys of key/value head `group`, from `first_unit` on,
// in the scratch. Adds their contributions to d_q, which has the sums of the query heads of `group`:
// [width][32] per block of queries.
void backward_units(const Inputs& x, int64_t group, int64_t first_unit, int64_t count,
                    const QueryBlocks& query_blocks, const BackwardScratch& s, const QuerySums& d_q) {
  const auto& shape = x.shape;
  const int64_t width = x.width, elements = x.factor_elements(), stride = shape.k_stride();
  const auto scale = static_cast<float>(x.in.scale) * kLog2E;
  Range all_blocks{x.num_blocks(), 0};
  std::array<Range, kBackwardUnits> unit_blocks{};
  for (int64_t i = 0; i < count; ++i) {
    const auto& unit = x.units[first_unit + i];
    pack_block(s.k + i * elements, x.k(unit, group), stride, false, unit.rows.size(), shape.head_dim);
    pack_block(s.v + i * elements, x.v(unit, group), stride, false, unit.rows.size(), shape.head_dim);
    pack_columns(s.k_turned + i * elements, x, x.k(unit, group), stride, unit.rows.size());
    unit_blocks[i] = KeyUnits::blocks(unit);
    all_blocks.begin = std::min(all_blocks.begin, unit_blocks[i].begin);
    all_blocks.end = std::max(all_blocks.end, unit_blocks[i].end);
  }
  std::fill(s.d_k, s.d_k + count * elements, 0.0f);
  std::fill(s.d_v, s.d_v + count * elements, 0.0f);

  std::array<const Element*, std::max(kBackwardBlocks, kBackwardUnits)> left{}, right{};
  for (int64_t h = 0; h < shape.heads_per_group(); ++h) {
    const int64_t head = group * shape.heads_per_group() + h;
    for (int64_t begin = all_blocks.begin; begin < all_blocks.end; begin += kBackwardBlocks) {
      const int64_t end = std::min(all_blocks.end, begin + kBackwardBlocks);
      std::array<std::array<int64_t, kBackwardUnits>, kBackwardBlocks> units_of_block{};
      std::array<int64_t, kBackwardBlocks> num_units_of_block{};
      for (int64_t i = 0; i < count; ++i) {
        const int64_t first = std::max(begin, unit_blocks[i].begin), last = std::min(end, unit_blocks[i].end);
        if (first >= last) continue;
        for (int64_t b = first; b < last; ++b) {
          const auto block = query_blocks.block(head, b);
          const int64_t slot = b - begin, number = num_units_of_block[slot]++;
          units_of_block[slot][number] = i;
          multiply_block(s.scores, kUnit, false, s.k + i * elements, 0, true, block.q_turned, kUnit, width);
          multiply_block(s.d_p, kUnit, false, s.v + i * elements, 0, true, block.d_o_turned, kUnit, width);
          softmax_backward_unit(
              s.scores, s.d_p, KeyUnits::mask(x.units[first_unit + i], block_queries(shape, b)), scale,
              block.lse, block.dots, s.p + slot * kUnitElements, s.d_s + slot * kUnitElements,
              s.d_s_right + (slot * kBackwardUnits + number) * kUnitElements);
        }
        const auto add = [&](float* sums, const Element* factor, Element* QueryBlock::*rows) {
          for (int64_t column = 0; column < width; column += kUnit) {
            for (int64_t b = first; b < last; ++b) {
              left[b - first] = factor + (b - begin) * kUnitElements;
              right[b - first] = query_blocks.block(head, b).*rows + column * kUnit;
            }
            add_products(sums + i * elements + column, width, left.data(), right.data(), last - first);
          }
        };
        add(s.d_v, s.p, &QueryBlock::d_o);
        add(s.d_k, s.d_s, &QueryBlock::q);
      }
      for (int64_t slot = 0; slot < end - begin; ++slot) {
        const int64_t number = num_units_of_block[slot];
        if (number == 0) continue;
        float* sums = d_q.of(h, {begin + slot, begin + slot + 1});
        for (int64_t column = 0; column < width; column += kUnit) {
          for (int64_t j = 0; j < number; ++j) {
            left[j] = s.k_turned + units_of_block[slot][j] * elements + column * kUnit;
            right[j] = s.d_s_right + (slot * kBackwardUnits + j) * kUnitElements;
          }
          add_products(sums + column * kUnit, kUnit, left.data(), right.data(), number);
        }
      }
    }
  }
}

struct Way {
  using Element = bf16::Element;
  using Session = bf16::Session;
  using QueryBlocks = bf16::QueryBlocks;
  using Scratch = BackwardScratch;
  static constexpr int64_t kUnits = kBackwardUnits;

  static void add_units(const Inputs& x, int64_t group, int64_t first, int64_t count,
                        const QueryBlocks& queries, const Scratch& scratch, const QuerySums& d_q) {
    backward_units(x, group, first, count, queries, scratch, d_q);
  }
  static void store_d_q(const Inputs& x, const Range& queries, const float* sums, Element* out) {
    alignas(64) std::array<float, kUnit> scales;
    scales.fill(static_cast<float>(x.in.scale));
    store_turned(sums, scales.data(), queries.size(), out, x.shape.q_stride(), x.shape.head_dim);
  }
};
}  // namespace
}  // namespace bf16

TreeAttentionGradient tree_attention_backward_bf16(const TreeAttentionInput& in,
                                                   const TreeAttentionOutput& out, const at::Tensor& d_o,
                                                   const at::Tensor& d_k_stack, const at::Tensor& d_v_stack) {
  return backward_in_units<bf16::Way>(in, out, d_o, d_k_stack, d_v_stack);
}

}  // namespace bough

// For each 8 units of keys and each query head that reads them, 2 blocks of queries times 2 units at a time:
//   Sᵀ = K·Qᵀ, dPᵀ = V·dOᵀ, Pᵀ and dSᵀ in place, dV += Pᵀ·dO, dK += dSᵀ·Q, dQ += dS·K
// Units and blocks of queries: tree_attention_units.h. Each matrix row of Sᵀ, Pᵀ and dSᵀ belongs to one key.
// The last product reads dSᵀ transposed.
#include <array>
#include <limits>

#include "kernels/tree_attention/tree_attention_fp32.h"

namespace bough {

namespace fp32 {
namespace {
constexpr int64_t kBackwardUnits = kFp32BackwardUnits;
// Units of keys and blocks of queries of one Step (below). The scores of a Step stay in the L1 cache.
constexpr int64_t kStepUnits = 2, kStepBlocks = 2;
constexpr int64_t kScoreStride = kStepBlocks * kUnit;

// The queries and output gradients of every head, in the layouts that the backward products read.
template <class T>
class QueryBlocks {
 public:
  explicit QueryBlocks(const UnitInputs<T>& x)
      : elements_(x.factor_elements()),
        per_head_(x.num_blocks()),
        factors_(kQueryLayouts * x.shape.num_heads * per_head_ * elements_),
        scalars_(kQueryScalars * x.shape.num_heads * per_head_ * kUnit) {}

  // Each function returns the data of one head's blocks of queries from `block` on. For each block: q and d_o
  // as [32][width], q_turned and d_o_turned as [width][32], lse (base 2) and dots (D) as [32].
  float* q(int64_t head, int64_t block) const { return factor(0, head, block); }
  float* d_o(int64_t head, int64_t block) const { return factor(1, head, block); }
  float* q_turned(int64_t head, int64_t block) const { return factor(2, head, block); }
  float* d_o_turned(int64_t head, int64_t block) const { return factor(3, head, block); }
  float* lse(int64_t head, int64_t block) const {
    return scalars_.get() + (head * per_head_ + block) * kQueryScalars * kUnit;
  }
  float* dots(int64_t head, int64_t block) const { return lse(head, block) + kUnit; }

  void load(const UnitInputs<T>& x, int64_t head, int64_t block, const T* d_o_data, const T* o_data,
            const float* lse_data) const {
    const auto& shape = x.shape;
    const Range queries = block_queries(shape, block);
    load_block(q(head, block), q_turned(head, block), x, data<T>(x.in.q_TNH), queries, head);
    load_block(d_o(head, block), d_o_turned(head, block), x, d_o_data, queries, head);
    const int64_t count = queries.size(), offset = queries.begin * shape.q_stride() + head * shape.head_dim;
    float* const block_dots = dots(head, block);
    float* const block_lse = lse(head, block);
    BOUGH_ISA_CALL(row_dots, block_dots, d_o_data + offset, o_data + offset, count, shape.head_dim,
                   shape.q_stride());
    for (int64_t i = 0; i < count; ++i)
      block_lse[i] = lse_data[(queries.begin + i) * shape.num_heads + head] * kLog2E;
    // Padding rows get probabilities of 0.
    std::fill(block_lse + count, block_lse + kUnit, std::numeric_limits<float>::max());
    std::fill(block_dots + count, block_dots + kUnit, 0.0f);
  }

 private:
  float* factor(int64_t number, int64_t head, int64_t block) const {
    return factors_.get() + ((head * kQueryLayouts + number) * per_head_ + block) * elements_;
  }

  int64_t elements_, per_head_;
  Workspace<float> factors_, scalars_;
};

// The scratch of one thread for up to kBackwardUnits units of keys.
struct BackwardScratch {
  explicit BackwardScratch(int64_t elements)
      : memory(kBackwardUnits * 4 * elements + 2 * kStepUnits * kUnit * kScoreStride),
        k(memory.get()),
        v(k + kBackwardUnits * elements),
        d_k(v + kBackwardUnits * elements),
        d_v(d_k + kBackwardUnits * elements),
        scores(d_v + kBackwardUnits * elements),
        d_p(scores + kStepUnits * kUnit * kScoreStride) {}

  AlignedBuffer<float> memory;
  float *k, *v, *d_k, *d_v;  // [kBackwardUnits][32][width]
  float *scores, *d_p;       // [kStepUnits][32][kScoreStride]
};

void clear_unit(const BackwardScratch& s, int64_t at) {
  for (float* scores : {s.scores + at, s.d_p + at})
    for (int64_t j = 0; j < kUnit; ++j) std::fill_n(scores + j * kScoreStride, kUnit, 0.0f);
}

// The keys and queries of one backward_step(). Unit 0 is the first unit of keys in BackwardScratch.
struct Step {
  Range units, blocks;
  int64_t head;
};

// compute_scores computes P and dS for the units and blocks of a Step, with zeros for invisible pairs. It
// returns the units of keys (rows) and the blocks of queries (columns) from the first to the last visible
// one.
struct Computed {
  Range rows, columns;
};
template <class T>
Computed compute_scores(const UnitInputs<T>& x, int64_t first_unit, const Step& step,
                        const QueryBlocks<T>& queries, const BackwardScratch& s) {
  const int64_t elements = x.factor_elements();
  const auto scale = static_cast<float>(x.in.scale) * kLog2E;
  Computed computed{{step.units.end, 0}, {step.blocks.end, 0}};
  for (int64_t block = step.blocks.begin; block < step.blocks.end; ++block) {
    const Range block_range = block_queries(x.shape, block);
    const auto visible = [&](int64_t i) { return KeyUnits::visible(x.units[first_unit + i], block_range); };
    const auto place = [&](int64_t i) {
      return (i - step.units.begin) * kUnit * kScoreStride + (block - step.blocks.begin) * kUnit;
    };
    Range rows = step.units;
    while (rows.size() > 0 && !visible(rows.begin)) clear_unit(s, place(rows.begin++));
    while (rows.size() > 0 && !visible(rows.end - 1)) clear_unit(s, place(--rows.end));
    if (rows.size() == 0) continue;
    computed.rows = {std::min(computed.rows.begin, rows.begin), std::max(computed.rows.end, rows.end)};
    computed.columns = {std::min(computed.columns.begin, block), block + 1};
    const int64_t at = place(rows.begin);
    const ProductShape shape{rows.size() * kUnit, kUnit, x.width};
    multiply(s.scores + at, kScoreStride, false, {s.k + rows.begin * elements, x.width},
             queries.q_turned(step.head, block), kUnit, shape);
    multiply(s.d_p + at, kScoreStride, false, {s.v + rows.begin * elements, x.width},
             queries.d_o_turned(step.head, block), kUnit, shape);
    for (int64_t i = rows.begin; i < rows.end; ++i)
      BOUGH_AVX_CALL(softmax_backward, s.scores + place(i), s.d_p + place(i), kScoreStride,
                     KeyUnits::mask(x.units[first_unit + i], block_range), scale,
                     queries.lse(step.head, block), queries.dots(step.head, block));
  }
  return computed;
}

// Adds the contributions of one Step to d_k and d_v in the scratch and to d_q.
template <class T>
void backward_step(const UnitInputs<T>& x, int64_t first_unit, const Step& step,
                   const QueryBlocks<T>& queries, const BackwardScratch& s, const QuerySums& d_q) {
  const int64_t width = x.width, elements = x.factor_elements();
  const auto [rows, columns] = compute_scores(x, first_unit, step, queries, s);
  if (rows.size() <= 0) return;
  const int64_t at =
      (rows.begin - step.units.begin) * kUnit * kScoreStride + (columns.begin - step.blocks.begin) * kUnit;
  const int64_t num_keys = rows.size() * kUnit, num_queries = columns.size() * kUnit;
  const ProductShape of_keys{num_keys, width, num_queries};
  multiply(s.d_v + rows.begin * elements, width, true, {s.scores + at, kScoreStride},
           queries.d_o(step.head, columns.begin), width, of_keys);
  multiply(s.d_k + rows.begin * elements, width, true, {s.d_p + at, kScoreStride},
           queries.q(step.head, columns.begin), width, of_keys);
  multiply(d_q.of(step.head % x.shape.heads_per_group(), columns), width, true,
           {s.d_p + at, kScoreStride, true}, s.k + rows.begin * elements, width,
           {num_queries, width, num_keys});
}

// Computes d_k and d_v of units [first_unit, first_unit + count) of keys of key/value head `group` in the
// scratch, and adds their contributions to d_q.
template <class T>
void backward_units(const UnitInputs<T>& x, int64_t group, int64_t first_unit, int64_t count,
                    const QueryBlocks<T>& queries, const BackwardScratch& s, const QuerySums& d_q) {
  const int64_t elements = x.factor_elements(), heads = x.shape.heads_per_group();
  load_units(s.k, x, x.in.k_TGH, x.in.k_stack_PGH, group, first_unit, count);
  load_units(s.v, x, x.in.v_TGH, x.in.v_stack_PGH, group, first_unit, count);
  std::fill(s.d_k, s.d_k + 2 * kBackwardUnits * elements, 0.0f);
  Range blocks{x.num_blocks(), 0};
  for (int64_t i = 0; i < count; ++i) {
    const Range seen = KeyUnits::blocks(x.units[first_unit + i]);
    blocks = {std::min(blocks.begin, seen.begin), std::max(blocks.end, seen.end)};
  }
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t block = blocks.begin; block < blocks.end; block += kStepBlocks)
      for (int64_t unit = 0; unit < count; unit += kStepUnits)
        backward_step(x, first_unit,
                      {{unit, std::min(count, unit + kStepUnits)},
                       {block, std::min(blocks.end, block + kStepBlocks)},
                       group * heads + h},
                      queries, s, d_q);
}

template <class T>
struct Way {
  using Element = T;
  using Session = NoSession;
  using QueryBlocks = fp32::QueryBlocks<T>;
  using Scratch = BackwardScratch;
  static constexpr int64_t kUnits = kBackwardUnits;

  static void add_units(const UnitInputs<T>& x, int64_t group, int64_t first, int64_t count,
                        const QueryBlocks& queries, const Scratch& scratch, const QuerySums& d_q) {
    backward_units<T>(x, group, first, count, queries, scratch, d_q);
  }
  static void store_d_q(const UnitInputs<T>& x, const Range& queries, const float* sums, T* out) {
    const auto scale = static_cast<float>(x.in.scale);
    BOUGH_ISA_CALL(store_rows, out, x.shape.q_stride(), sums, x.width, &scale, true, queries.size(),
                   x.shape.head_dim);
  }
};
}  // namespace
}  // namespace fp32

TreeAttentionGradient tree_attention_backward_fp32(const TreeAttentionInput& in,
                                                   const TreeAttentionOutput& out, const at::Tensor& d_o,
                                                   const at::Tensor& d_k_stack, const at::Tensor& d_v_stack) {
  return in.q_TNH.scalar_type() == at::kFloat
             ? backward_in_units<fp32::Way<float>>(in, out, d_o, d_k_stack, d_v_stack)
             : backward_in_units<fp32::Way<BFloat16Bits>>(in, out, d_o, d_k_stack, d_v_stack);
}

}  // namespace bough

// For each block of queries, up to 4 units of keys at a time, for each query head of the key/value head:
//   Sᵀ = K·Qᵀ, Pᵀ = softmax(Sᵀ) in place, O += P·V
// Each matrix row of Sᵀ belongs to one key, so maxima and sums over keys are vectors with one lane per query.
// The last product reads Pᵀ transposed. Units and blocks of queries: tree_attention_units.h.
#include <array>
#include <cmath>

#include "kernels/tree_attention/tree_attention_fp32.h"

namespace bough {

namespace fp32 {
namespace {
constexpr int64_t kForwardUnits = 4;  // units of keys at a time; scores and a head's sums stay in cache

// Returns runs of consecutive units of keys in which the block of queries may see a key. A run has at most
// kForwardUnits units.
template <class T>
std::vector<Range> visible_runs(const UnitInputs<T>& x, const Range& queries) {
  std::vector<Range> runs;
  for (int64_t u = 0; u < x.units.size(); ++u) {
    if (!KeyUnits::visible(x.units[u], queries)) continue;
    if (runs.empty() || runs.back().end != u || runs.back().size() == kForwardUnits) runs.push_back({u, u});
    runs.back().end = u + 1;
  }
  return runs;
}

// Initializes the running softmax before the first keys.
void begin_softmax(const OnlineSoftmax& rows) {
  std::fill_n(rows.max, kUnit, kLowest);
  std::fill_n(rows.sums, kUnit, 0.0f);
  std::fill_n(rows.o, kUnit * rows.width, 0.0f);
}

// Computes the attention of blocks of queries number share, share + num_shares, ... of key/value head
// `group`.
template <class T>
void forward_share(const UnitInputs<T>& x, int64_t group, int64_t share, int64_t num_shares, T* o_data,
                   float* lse_data) {
  const auto& shape = x.shape;
  const int64_t heads = shape.heads_per_group(), width = x.width, elements = x.factor_elements();
  const auto scale = static_cast<float>(x.in.scale) * kLog2E;
  const Workspace<float> keys_and_values(2 * x.units.size() * elements);
  float* const keys = keys_and_values.get();
  float* const values = keys + x.units.size() * elements;
  load_units(keys, x, x.in.k_TGH, x.in.k_stack_PGH, group, 0, x.units.size());
  load_units(values, x, x.in.v_TGH, x.in.v_stack_PGH, group, 0, x.units.size());

  const int64_t sums_of_a_head = elements + 2 * kUnit;
  const AlignedBuffer<float> scratch(heads * (sums_of_a_head + elements) + elements +
                                     kForwardUnits * kUnitElements);
  float* const queries_turned = scratch.get() + heads * sums_of_a_head;
  float* const query_rows = queries_turned + heads * elements;
  float* const scores = query_rows + elements;
  std::vector<OnlineSoftmax> rows;
  for (int64_t h = 0; h < heads; ++h) {
    float* o = scratch.get() + h * sums_of_a_head;
    rows.push_back({o + elements, o + elements + kUnit, o, width});
  }
  for (int64_t block = share; block < x.num_blocks(); block += num_shares) {
    const Range queries = block_queries(shape, block);
    for (int64_t h = 0; h < heads; ++h) {
      load_block(query_rows, queries_turned + h * elements, x, data<T>(x.in.q_TNH), queries,
                 group * heads + h);
      begin_softmax(rows[h]);
    }
    for (const Range& run : visible_runs(x, queries)) {
      std::array<UnitMask, kForwardUnits> masks;
      for (int64_t u = run.begin; u < run.end; ++u)
        masks[u - run.begin] = KeyUnits::mask(x.units[u], queries);
      const int64_t num_keys = run.size() * kUnit;
      for (int64_t h = 0; h < heads; ++h) {
        multiply(scores, kUnit, false, {keys + run.begin * elements, width}, queries_turned + h * elements,
                 kUnit, {num_keys, kUnit, width});
        BOUGH_AVX_CALL(online_softmax, scores, masks.data(), run.size(), scale, rows[h]);
        multiply(rows[h].o, width, true, {scores, kUnit, true}, values + run.begin * elements, width,
                 {kUnit, width, num_keys});
      }
    }
    const int64_t first_row = queries.begin * shape.num_heads + group * heads;
    for (int64_t h = 0; h < heads; ++h) {
      std::array<float, kUnit> inverse;
      for (int64_t i = 0; i < queries.size(); ++i) {
        inverse[i] = 1.0f / rows[h].sums[i];
        lse_data[first_row + i * shape.num_heads + h] =
            (rows[h].max[i] + std::log2(rows[h].sums[i])) / kLog2E;
      }
      BOUGH_ISA_CALL(store_rows, o_data + (first_row + h) * shape.head_dim, shape.q_stride(), rows[h].o,
                     width, inverse.data(), false, queries.size(), shape.head_dim);
    }
  }
}

template <class T>
void forward(const TreeAttentionInput& in, const at::Tensor& o, const at::Tensor& lse) {
  const UnitInputs<T> x(in);
  const int64_t num_shares = attention_shares(at::get_num_threads(), x.shape.num_groups, x.num_blocks());
  T* o_data = mutable_data<T>(o);
  auto* lse_data = mutable_data<float>(lse);
  for_each_share<NoSession>(x.shape.num_groups, num_shares, [&](int64_t group, int64_t share) {
    forward_share<T>(x, group, share, num_shares, o_data, lse_data);
  });
}
}  // namespace
}  // namespace fp32

void tree_attention_forward_fp32(const TreeAttentionInput& in, const at::Tensor& o, const at::Tensor& lse) {
  in.q_TNH.scalar_type() == at::kFloat ? fp32::forward<float>(in, o, lse)
                                       : fp32::forward<BFloat16Bits>(in, o, lse);
}

}  // namespace bough

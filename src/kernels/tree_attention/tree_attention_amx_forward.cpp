// For each block of queries, 16 units of keys at a time, for each head of the group:
//   S = Q·Kᵀ, P = softmax(S), O += P·V
#include <array>

#include "kernels/tree_attention/tree_attention_amx.h"

namespace bough {

namespace amx {
namespace {
constexpr int64_t kForwardUnits = 16;  // of keys whose scores are in flight

// One group's keys and values as right factors, for all its blocks of queries.
class PackedKeys {
 public:
  PackedKeys(const Inputs& x, int64_t group)
      : elements_(x.factor_elements()), factors_(2 * x.units.size() * elements_) {
    for (int64_t u = 0; u < x.units.size(); ++u) {
      const auto& unit = x.units[u];
      const int64_t stride = x.shape.k_stride();
      Element* both = factors_.get() + u * 2 * elements_;
      pack_panel(both, x.k(unit, group), stride, true, x.shape.head_dim, unit.rows.size());
      pack_rows(both + elements_, x, x.v(unit, group), stride, unit.rows.size());
    }
  }
  const Element* k(int64_t unit) const { return factors_.get() + unit * 2 * elements_; }
  const Element* v(int64_t unit) const { return k(unit) + elements_; }

 private:
  int64_t elements_;
  Workspace<Element> factors_;
};

// Blocks share, share + num_shares, ... of one group's queries.
void forward_share(const Inputs& x, int64_t group, int64_t share, int64_t num_shares, Element* o_data,
                   float* lse_data) {
  const auto& shape = x.shape;
  const int64_t heads = shape.heads_per_group(), width = x.width, elements = x.factor_elements();
  const auto scale = static_cast<float>(x.in.scale) * kLog2E;
  const PackedKeys keys(x, group);
  constexpr int64_t kRowSums = kUnit * kLanes;
  const AlignedBuffer<float> sums(heads * (elements + kRowSums + kUnit) + kForwardUnits * kScoreStride);
  const AlignedBuffer<Element> factors(heads * elements + kForwardUnits * kProbabilityStride);
  float* const scores = sums.get() + heads * (elements + kRowSums + kUnit);
  Element* const probabilities = factors.get() + heads * elements;
  std::vector<OnlineSoftmax> rows;
  for (int64_t h = 0; h < heads; ++h) {
    float* o = sums.get() + h * (elements + kRowSums + kUnit);
    rows.push_back({o + elements + kRowSums, o + elements, o, width});
  }
  std::array<const Element*, kForwardUnits> left{}, right{};
  for (int64_t i = 0; i < kForwardUnits; ++i) left[i] = probabilities + i * kProbabilityStride;
  std::vector<int64_t> visible;
  for (int64_t block = share; block < x.num_blocks(); block += num_shares) {
    const Range queries = block_queries(shape, block);
    visible.clear();
    for (int64_t u = 0; u < x.units.size(); ++u)
      if (KeyUnits::visible(x.units[u], queries)) visible.push_back(u);
    const int64_t first_row = queries.begin * shape.num_heads + group * heads;
    for (int64_t h = 0; h < heads; ++h) {
      begin_softmax(rows[h]);
      pack_block(factors.get() + h * elements, data<Element>(x.in.q_TNH) + (first_row + h) * shape.head_dim,
                 shape.q_stride(), false, queries.size(), shape.head_dim);
    }
    const auto num_visible = static_cast<int64_t>(visible.size());
    for (int64_t begin = 0; begin < num_visible; begin += kForwardUnits) {
      const int64_t* unit = visible.data() + begin;
      const int64_t count = std::min(kForwardUnits, num_visible - begin);
      std::array<UnitMask, kForwardUnits> masks;
      for (int64_t i = 0; i < count; ++i) masks[i] = KeyUnits::mask(x.units[unit[i]], queries);
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < count; ++i)
          multiply_block(scores + i * kScoreStride, kUnit, false, factors.get() + h * elements, 0, true,
                         keys.k(unit[i]), width);
        softmax_units(scores, probabilities, masks.data(), count, scale, rows[h]);
        for (int64_t column = 0; column < width; column += kUnit) {
          for (int64_t i = 0; i < count; ++i) right[i] = keys.v(unit[i]) + column * kUnit;
          add_products(rows[h].o + column, width, left.data(), right.data(), count);
        }
      }
    }
    for (int64_t h = 0; h < heads; ++h)
      finish_softmax(rows[h], queries.size(), o_data + (first_row + h) * shape.head_dim, shape.q_stride(),
                     shape.head_dim, lse_data + first_row + h, shape.num_heads);
  }
}
}  // namespace
}  // namespace amx

void tree_attention_forward_amx(const TreeAttentionInput& in, const at::Tensor& o, const at::Tensor& lse) {
  const amx::Inputs x(in);
  const int64_t num_shares = amx::shares_of_a_group(x.shape.num_groups, x.num_blocks());
  auto* o_data = mutable_data<BFloat16Bits>(o);
  auto* lse_data = mutable_data<float>(lse);
  amx::for_each_share(x.shape.num_groups, num_shares, [&](int64_t group, int64_t share) {
    amx::forward_share(x, group, share, num_shares, o_data, lse_data);
  });
}

}  // namespace bough

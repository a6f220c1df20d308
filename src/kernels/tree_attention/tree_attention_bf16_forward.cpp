// For each block of queries, 8 units of keys at a time, for each query head of the key/value head:
//   Sᵀ = K·Qᵀ, Pᵀ = softmax(Sᵀ) in place, Oᵀ += Vᵀ·Pᵀ
// Scores are transposed: vectors have one lane per query, so maxima and sums over keys are vectors, and Pᵀ is
// written directly as the right factor of Oᵀ. Units and blocks of queries: tree_attention_units.h.
#include <array>

#include "kernels/matrix_product/bf16_products.h"
#include "kernels/tree_attention/tree_attention_bf16.h"
#include "kernels/tree_attention/tree_attention_products.h"

namespace bough {

namespace bf16 {
namespace {
constexpr int64_t kForwardUnits = 8;  // units of keys at a time; scores and a head's sums stay in cache

// All keys [32, H] and transposed values [H, 32] of one key/value head, packed once as left factors per unit.
class PackedKeys {
 public:
  PackedKeys(const Inputs& x, int64_t group)
      : elements_(x.factor_elements()), factors_(2 * x.units.size() * elements_) {
    for (int64_t u = 0; u < x.units.size(); ++u) {
      const auto& unit = x.units[u];
      const int64_t stride = x.shape.k_stride();
      Element* both = factors_.get() + u * 2 * elements_;
      pack_block(both, x.k(unit, group), stride, false, unit.rows.size(), x.shape.head_dim);
      pack_columns(both + elements_, x, x.v(unit, group), stride, unit.rows.size());
    }
  }
  const Element* k(int64_t unit) const { return factors_.get() + unit * 2 * elements_; }
  const Element* v(int64_t unit) const { return k(unit) + elements_; }

 private:
  int64_t elements_;
  Workspace<Element> factors_;
};

// Computes the attention of blocks of queries number share, share + num_shares, ... of key/value head
// `group`.
void forward_share(const Inputs& x, int64_t group, int64_t share, int64_t num_shares, Element* o_data,
                   float* lse_data) {
  const auto& shape = x.shape;
  const int64_t heads = shape.heads_per_group(), width = x.width, elements = x.factor_elements();
  const auto scale = static_cast<float>(x.in.scale) * kLog2E;
  const auto multiply_keys = has_amx() ? amx::multiply_keys : dots::multiply_keys;
  const auto add_values = has_amx() ? amx::add_values : dots::add_values;
  const PackedKeys keys(x, group);
  const int64_t sums_of_a_head = elements + 2 * kUnit;
  const AlignedBuffer<float> sums(heads * sums_of_a_head + kForwardUnits * kScoreStride);
  const AlignedBuffer<Element> queries_turned(heads * elements);
  float* const scores = sums.get() + heads * sums_of_a_head;
  std::vector<OnlineSoftmax> rows;
  for (int64_t h = 0; h < heads; ++h) {
    float* o = sums.get() + h * sums_of_a_head;
    rows.push_back({o + elements, o + elements + kUnit, o, width});
  }
  std::vector<int64_t> visible;
  for (int64_t block = share; block < x.num_blocks(); block += num_shares) {
    const Range queries = block_queries(shape, block);
    visible.clear();
    for (int64_t u = 0; u < x.units.size(); ++u)
      if (KeyUnits::visible(x.units[u], queries)) visible.push_back(u);
    const int64_t first_row = queries.begin * shape.num_heads + group * heads;
    for (int64_t h = 0; h < heads; ++h) {
      pack_panel(queries_turned.get() + h * elements,
                 data<Element>(x.in.q_TNH) + (first_row + h) * shape.head_dim, shape.q_stride(), true,
                 shape.head_dim, queries.size());
    }
    const auto num_visible = static_cast<int64_t>(visible.size());
    for (int64_t begin = 0; begin < num_visible; begin += kForwardUnits) {
      const int64_t count = std::min(kForwardUnits, num_visible - begin);
      std::array<UnitMask, kForwardUnits> masks;
      std::array<const Element*, kForwardUnits> k{}, v{};
      for (int64_t i = 0; i < count; ++i) {
        const int64_t unit = visible[begin + i];
        masks[i] = KeyUnits::mask(x.units[unit], queries);
        k[i] = keys.k(unit);
        v[i] = keys.v(unit);
      }
      for (int64_t h = 0; h < heads; ++h) {
        const auto multiply = [&] {
          multiply_keys(scores, k.data(), count, queries_turned.get() + h * elements, width);
        };
        multiply();
        if (begin == 0) raise_maxima(scores, masks.data(), count, scale, true, rows[h]);
        if (!softmax_units(scores, masks.data(), count, scale, rows[h])) {
          multiply();
          raise_maxima(scores, masks.data(), count, scale, false, rows[h]);
          softmax_units(scores, masks.data(), count, scale, rows[h]);
        }
        add_values(rows[h].o, begin > 0, v.data(), scores, count, width);
      }
    }
    for (int64_t h = 0; h < heads; ++h)
      finish_softmax(rows[h], queries.size(), o_data + (first_row + h) * shape.head_dim, shape.q_stride(),
                     shape.head_dim, lse_data + first_row + h, shape.num_heads);
  }
}
}  // namespace
}  // namespace bf16

void tree_attention_forward_bf16(const TreeAttentionInput& in, const at::Tensor& o, const at::Tensor& lse) {
  const bf16::Inputs x(in);
  const int64_t num_shares = attention_shares(at::get_num_threads(), x.shape.num_groups, x.num_blocks());
  auto* o_data = mutable_data<BFloat16Bits>(o);
  auto* lse_data = mutable_data<float>(lse);
  for_each_share<bf16::Session>(x.shape.num_groups, num_shares, [&](int64_t group, int64_t share) {
    bf16::forward_share(x, group, share, num_shares, o_data, lse_data);
  });
}

}  // namespace bough

#include "kernels/experts/expert_pairs.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/common/op.h"
#include "kernels/experts/experts_loops.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/parameter.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  // Contracts: expert_pairs.h. Returns pairs, places and ends.
  m.def("sort_pairs(Tensor experts, int num_experts) -> (Tensor, Tensor, Tensor)");
  m.def("grouped_product(Tensor a, Tensor weight, Tensor ends, bool is_transposed) -> Tensor");
  m.def("add_weighted_rows(Tensor rows, Tensor places, Tensor? weights, Tensor? residual) -> Tensor");
  m.def("weigh_rows_(Tensor(a!) a, Tensor(b!) d_gate_up, Tensor d_a, Tensor weights) -> Tensor");
}

namespace bough {

using OptionalTensor = std::optional<at::Tensor>;

SortedPairs sort_pairs(const at::Tensor& experts_TK, int64_t num_experts) {
  using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
  static const auto op = find_op<Results(const at::Tensor&, int64_t)>("bough::sort_pairs");
  auto [pairs_P, places_TK, ends_E] = op.call(experts_TK.contiguous(), num_experts);
  return {std::move(pairs_P), std::move(places_TK), std::move(ends_E)};
}

std::vector<ExpertRows> rows_of_experts(const at::Tensor& ends_E, int64_t num_rows) {
  const auto* const ends = data<int32_t>(ends_E);
  std::vector<ExpertRows> experts;
  int64_t begin = 0;
  for (int64_t e = 0; e < ends_E.size(0); begin = ends[e++])
    if (ends[e] > begin) experts.push_back({e, begin, ends[e] - begin});
  BOUGH_CHECK(begin == num_rows, "experts_mlp: ", num_rows - begin, " of ", num_rows,
              " pairs of a token and an expert have an index out of range; expected 0 to ",
              ends_E.size(0) - 1);
  return experts;
}

at::Tensor grouped_product(const at::Tensor& a_PK, const at::Tensor& weight, const at::Tensor& ends_E,
                           bool is_transposed) {
  static const auto op = find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool)>(
      "bough::grouped_product");
  return op.call(a_PK, weight, ends_E, is_transposed);
}

at::Tensor add_weighted_rows(const at::Tensor& rows_PD, const at::Tensor& places_TK,
                             const OptionalTensor& weights_TK, const OptionalTensor& residual_TD) {
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&)>(
          "bough::add_weighted_rows");
  return op.call(rows_PD, places_TK, weights_TK, residual_TD);
}

at::Tensor weigh_rows_(const at::Tensor& a_PF, const at::Tensor& d_gate_up_PF2, const at::Tensor& d_a_PF,
                       const at::Tensor& weights_P) {
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&)>(
          "bough::weigh_rows_");
  return op.call(a_PF, d_gate_up_PF2, d_a_PF, weights_P);
}

namespace {

// ---- References

std::tuple<at::Tensor, at::Tensor, at::Tensor> sort_pairs_reference(const at::Tensor& experts_TK,
                                                                    int64_t num_experts) {
  const auto experts_P = experts_TK.flatten();
  const auto is_known_P = experts_P.ge(0).logical_and_(experts_P.lt(num_experts));
  const auto [sorted_P, pairs_P] = at::sort(at::where(is_known_P, experts_P, num_experts), /*stable=*/true,
                                            /*dim=*/0, /*descending=*/false);
  const auto rows_P = at::arange(experts_P.size(0), experts_P.options());
  const auto places_P = at::empty_like(experts_P).scatter_(0, pairs_P, rows_P);
  const auto ends_E = at::searchsorted(sorted_P, at::arange(num_experts, experts_P.options()),
                                       /*out_int32=*/true, /*right=*/true);
  return {pairs_P, at::where(is_known_P, places_P, -1).view(experts_TK.sizes()), ends_E};
}

at::Tensor grouped_product_reference(const at::Tensor& a_PK, const at::Tensor& weight,
                                     const at::Tensor& ends_E, bool is_transposed) {
  const int64_t rows = weight.size(0) / ends_E.size(0);
  const auto c_PO = at::empty({a_PK.size(0), is_transposed ? rows : weight.size(1)}, a_PK.options());
  for (const auto& [expert, begin, size] : rows_of_experts(ends_E.cpu(), a_PK.size(0))) {
    const auto of_expert = weight.narrow(0, expert * rows, rows);
    c_PO.narrow(0, begin, size)
        .copy_(matrix_product(a_PK.narrow(0, begin, size), is_transposed ? of_expert.t() : of_expert));
  }
  return c_PO;
}

at::Tensor add_weighted_rows_reference(const at::Tensor& rows_PD, const at::Tensor& places_TK,
                                       const OptionalTensor& weights_TK, const OptionalTensor& residual_TD) {
  const auto accumulator = accumulator_type(rows_PD.scalar_type());
  auto rows_TKD = rows_PD.index_select(0, places_TK.flatten())
                      .view({places_TK.size(0), places_TK.size(1), rows_PD.size(1)})
                      .to(accumulator);
  if (weights_TK) rows_TKD = rows_TKD * weights_TK->unsqueeze(2);
  auto y_TD = rows_TKD.sum(1);
  if (residual_TD) y_TD = y_TD + residual_TD->to(accumulator);
  return y_TD.to(rows_PD.scalar_type());
}

at::Tensor weigh_rows_reference_(const at::Tensor& a_PF, const at::Tensor& d_gate_up_PF2,
                                 const at::Tensor& d_a_PF, const at::Tensor& weights_P) {
  const auto accumulator = weights_P.scalar_type();
  const auto d_weights_P = (d_a_PF.to(accumulator) * a_PF.to(accumulator)).sum(1);
  const auto weights_P1 = weights_P.unsqueeze(1);
  a_PF.copy_(a_PF.to(accumulator) * weights_P1);
  d_gate_up_PF2.copy_(d_gate_up_PF2.to(accumulator) * weights_P1);
  return d_weights_P;
}

// ---- CPU

// A counting sort.
std::tuple<at::Tensor, at::Tensor, at::Tensor> sort_pairs_cpu(const at::Tensor& experts_TK,
                                                              int64_t num_experts) {
  const int64_t num_chosen = experts_TK.size(1), count = experts_TK.numel();
  const auto* const expert = data<int64_t>(experts_TK);
  std::vector<int64_t> begins(static_cast<size_t>(num_experts) + 1);
  std::vector<int64_t> last_token(static_cast<size_t>(num_experts), -1);
  for (int64_t pair = 0; pair < count; ++pair) {
    BOUGH_CHECK(expert[pair] >= 0 && expert[pair] < num_experts, "experts_mlp: got expert ", expert[pair],
                " of ", num_experts);
    const auto e = static_cast<size_t>(expert[pair]);
    BOUGH_CHECK(last_token[e] != pair / num_chosen, "experts_mlp: token ", pair / num_chosen, " has expert ",
                expert[pair], " twice");
    last_token[e] = pair / num_chosen;
    ++begins[e + 1];
  }
  const at::Tensor ends_E = at::empty({num_experts}, experts_TK.options().dtype(at::kInt));
  for (size_t e = 0; e < last_token.size(); ++e) {
    begins[e + 1] += begins[e];
    mutable_data<int32_t>(ends_E)[e] = static_cast<int32_t>(begins[e + 1]);
  }
  const at::Tensor pairs_P = at::empty({count}, experts_TK.options()), places_TK = at::empty_like(experts_TK);
  auto *const pairs = mutable_data<int64_t>(pairs_P), *const places = mutable_data<int64_t>(places_TK);
  for (int64_t pair = 0; pair < count; ++pair) {
    const int64_t row = begins[static_cast<size_t>(expert[pair])]++;
    pairs[row] = pair;
    places[pair] = row;
  }
  return {pairs_P, places_TK, ends_E};
}

at::Tensor add_weighted_rows_cpu(const at::Tensor& rows_PD, const at::Tensor& places_TK,
                                 const OptionalTensor& weights_TK, const OptionalTensor& residual_TD) {
  const int64_t num_tokens = places_TK.size(0), num_chosen = places_TK.size(1), width = rows_PD.size(1);
  const auto y_TD = at::empty({num_tokens, width}, rows_PD.options());
  dispatch_float_types(rows_PD.scalar_type(), "add_weighted_rows", [&]<class T>() {
    using A = AccOf<T>;
    at::parallel_for(0, num_tokens, grain((num_chosen + 1) * width), [&](int64_t begin, int64_t end) {
      std::vector<A> sums(static_cast<size_t>(width));
      const A* const weights = weights_TK ? data<A>(*weights_TK) + begin * num_chosen : nullptr;
      const T* const residual = residual_TD ? data<T>(*residual_TD) + begin * width : nullptr;
      BOUGH_ISA_CALL(add_weighted_rows, mutable_data<T>(y_TD) + begin * width, data<T>(rows_PD),
                     data<int64_t>(places_TK) + begin * num_chosen, weights, residual, end - begin,
                     num_chosen, width, sums.data());
    });
  });
  return y_TD;
}

at::Tensor weigh_rows_cpu_(const at::Tensor& a_PF, const at::Tensor& d_gate_up_PF2, const at::Tensor& d_a_PF,
                           const at::Tensor& weights_P) {
  const int64_t width = a_PF.size(1);
  const auto d_weights_P = at::empty_like(weights_P);
  dispatch_float_types(a_PF.scalar_type(), "weigh_rows_", [&]<class T>() {
    using A = AccOf<T>;
    at::parallel_for(0, a_PF.size(0), grain(3 * width), [&](int64_t begin, int64_t end) {
      BOUGH_ISA_CALL(weigh_rows, mutable_data<A>(d_weights_P) + begin, mutable_data<T>(a_PF) + begin * width,
                     mutable_data<T>(d_gate_up_PF2) + 2 * begin * width, data<T>(d_a_PF) + begin * width,
                     data<A>(weights_P) + begin, end - begin, width);
    });
  });
  return d_weights_P;
}

}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("sort_pairs", TORCH_FN(bough::sort_pairs_reference));
  m.impl("grouped_product", TORCH_FN(bough::grouped_product_reference));
  m.impl("add_weighted_rows", TORCH_FN(bough::add_weighted_rows_reference));
  m.impl("weigh_rows_", TORCH_FN(bough::weigh_rows_reference_));
}

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("sort_pairs", TORCH_FN(bough::sort_pairs_cpu));
  m.impl("add_weighted_rows", TORCH_FN(bough::add_weighted_rows_cpu));
  m.impl("weigh_rows_", TORCH_FN(bough::weigh_rows_cpu_));
}

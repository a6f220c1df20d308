#include <ATen/ATen.h>

#include "kernels/common/op.h"
#include "kernels/parameter.h"
#include "kernels/tree_attention/tree_attention.h"

namespace bough {

namespace {
// Factors with the head as first dimension, all [N, ·, H]. k and v have the keys of the stack, then of the
// pass, copied for each query head of a key/value head.
struct Dense {
  at::Tensor q, k, v;
  at::Tensor probabilities;  // [N, T, P + T]
  at::Tensor lse;            // [N, T]
};

at::Tensor heads_first(const at::Tensor& x, at::ScalarType acc) {
  return x.to(acc).transpose(0, 1);
}

Dense compute(const TreeAttentionInput& in) {
  const auto acc = accumulator_type(in.q_TNH.scalar_type());
  const int64_t num_stack = in.k_stack_PGH.size(0);
  const int64_t num_tokens = in.q_TNH.size(0);
  const int64_t repeat = in.q_TNH.size(1) / in.k_TGH.size(1);
  Dense dense;
  dense.q = heads_first(in.q_TNH, acc);
  dense.k = heads_first(at::cat({in.k_stack_PGH, in.k_TGH}), acc).repeat_interleave(repeat, 0);
  dense.v = heads_first(at::cat({in.v_stack_PGH, in.v_TGH}), acc).repeat_interleave(repeat, 0);
  const auto options = in.end_local.options();
  const auto query = at::arange(num_tokens, options).unsqueeze(1);
  const auto key = at::arange(num_stack + num_tokens, options).unsqueeze(0) - num_stack;
  const auto visible = key.le(query).logical_and(query.lt(in.end_local.unsqueeze(0)));
  const auto scores = (at::bmm(dense.q, dense.k.transpose(1, 2)) * in.scale)
                          .masked_fill(visible.logical_not(), -std::numeric_limits<double>::infinity());
  dense.lse = scores.logsumexp(-1);
  dense.probabilities = (scores - dense.lse.unsqueeze(-1)).exp();
  return dense;
}

std::tuple<at::Tensor, at::Tensor> forward_op(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                              const at::Tensor& k_stack, const at::Tensor& v_stack,
                                              const at::Tensor& end_local,
                                              const std::optional<at::Tensor>& /*spans*/, double scale) {
  const auto out = tree_attention_forward_reference({q, k, v, k_stack, v_stack, end_local, scale});
  return {out.o_TNH, out.lse_TN};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_op(
    const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& k_stack, const at::Tensor& v_stack, const at::Tensor& end_local,
    const std::optional<at::Tensor>& /*spans*/, const at::Tensor& o, const at::Tensor& lse, double scale,
    const at::Tensor& d_k_stack, const at::Tensor& d_v_stack) {
  const auto d = tree_attention_backward_reference({q, k, v, k_stack, v_stack, end_local, scale}, {o, lse},
                                                   d_o, d_k_stack, d_v_stack);
  return {d.d_q_TNH, d.d_k_TGH, d.d_v_TGH};
}
}  // namespace

TreeAttentionOutput tree_attention_forward_reference(const TreeAttentionInput& in) {
  const auto dense = compute(in);
  const auto o = at::bmm(dense.probabilities, dense.v);
  return {o.transpose(0, 1).to(in.q_TNH.scalar_type()).contiguous(), dense.lse.t().contiguous()};
}

TreeAttentionGradient tree_attention_backward_reference(const TreeAttentionInput& in,
                                                        const TreeAttentionOutput& out,
                                                        const at::Tensor& d_o_TNH,
                                                        const at::Tensor& d_k_stack_PGH,
                                                        const at::Tensor& d_v_stack_PGH) {
  const auto acc = accumulator_type(in.q_TNH.scalar_type());
  const auto dense = compute(in);
  const auto d_o = heads_first(d_o_TNH, acc);
  // D = d_o · o is computed as sum_j p_ij (d_o[i] · v[j]), so that a query with a single visible key gets a
  // gradient of exactly 0.
  const auto d_probabilities = at::bmm(d_o, dense.v.transpose(1, 2));
  const auto d = (dense.probabilities * d_probabilities).sum(-1, true);
  const auto d_scores = dense.probabilities * (d_probabilities - d) * in.scale;
  const auto d_q = at::bmm(d_scores, dense.k).transpose(0, 1).to(in.q_TNH.scalar_type()).contiguous();
  const int64_t num_groups = in.k_TGH.size(1);
  const int64_t num_stack = in.k_stack_PGH.size(0);
  const auto by_group =
      [&](const at::Tensor& x) {  // [N, K, H] -> [K, G, H], summed over the group's query heads
        return x.view({num_groups, -1, x.size(1), x.size(2)}).sum(1).transpose(0, 1);
      };
  const auto d_k = by_group(at::bmm(d_scores.transpose(1, 2), dense.q));
  const auto d_v = by_group(at::bmm(dense.probabilities.transpose(1, 2), d_o));
  const int64_t num_tokens = in.q_TNH.size(0);
  d_k_stack_PGH.add_(d_k.narrow(0, 0, num_stack));
  d_v_stack_PGH.add_(d_v.narrow(0, 0, num_stack));
  return {d_q, d_k.narrow(0, num_stack, num_tokens).contiguous(),
          d_v.narrow(0, num_stack, num_tokens).contiguous()};
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("tree_attention_forward", TORCH_FN(bough::forward_op));
  m.impl("tree_attention_backward", TORCH_FN(bough::backward_op));
}

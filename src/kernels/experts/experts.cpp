#include "kernels/experts/experts.h"

#include <ATen/ATen.h>

#include <vector>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/common/op.h"
#include "kernels/experts/experts_loops.h"
#include "kernels/linear/linear.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/quantized_product/quantized_product.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/swiglu/swiglu.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  // [P, D], int64 [T, K], [T, K], [T, D]: returns residual[t] + sum_k weights[t,k] · rows[places[t,k]].
  m.def("add_weighted_rows(Tensor rows, Tensor places, Tensor? weights, Tensor? residual) -> Tensor");
  // [P, F], [P, 2F], [P, F], [P]: returns d_weights[p] = d_a[p] · a[p]; a and d_gate_up are multiplied by the
  // row's weight.
  m.def("weigh_rows_(Tensor(a!) a, Tensor(b!) d_gate_up, Tensor d_a, Tensor weights) -> Tensor");
}

namespace bough {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

// ---- The router

struct RouterFunction : torch::autograd::Function<RouterFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Parameter* norm,
                            const NormSettings& settings, const Parameter& router, bool in_model_dtype,
                            bool batch_invariant) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto h = x;
    at::Tensor rstd;
    if (norm) std::tie(h, rstd) = rms_norm_forward(x, norm->value, settings);
    context->save_for_backward({x, rstd});
    auto& data = context->saved_data;
    data["norm"] = norm ? norm->value : at::Tensor();
    data["norm_grad"] = norm ? norm->main_grad : at::Tensor();
    data["weight_offset"] = settings.weight_offset;
    data["router"] = router.value;
    data["router_grad"] = router.main_grad;
    data["in_model_dtype"] = in_model_dtype;
    const auto accumulator = accumulator_type(x.scalar_type());
    const auto type = in_model_dtype ? x.scalar_type() : accumulator;
    const auto product = batch_invariant ? batch_invariant_product : matrix_product;
    return product(h.to(type), router.value.to(type).t(), std::nullopt, std::nullopt).to(accumulator);
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &rstd = saved[1];
    auto& data = context->saved_data;
    const auto type = data["in_model_dtype"].toBool() ? x.scalar_type() : accumulator_type(x.scalar_type());
    const auto d_logits = d_outputs[0].contiguous().to(type);
    const auto d_h = matrix_product(d_logits, data["router"].toTensor().to(type)).to(x.scalar_type());
    auto d_x = d_h, h = x;
    if (rstd.defined()) {
      d_x = rms_norm_backward({.d_y = d_h,
                               .x = x,
                               .weight_D = data["norm"].toTensor(),
                               .rstd = rstd,
                               .d_weight_D = data["norm_grad"].toTensor(),
                               .y = d_h,
                               .weight_offset = data["weight_offset"].toDouble()});
      h = d_h;  // rms_norm_backward has written h here
    }
    add_linear_gradients(data["router_grad"].toTensor(), {}, d_logits, h.to(type));
    return {d_x, {}, {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor router_logits(const at::Tensor& x_TD, const Parameter* norm, const NormSettings& settings,
                         const Parameter& router, bool in_model_dtype, bool batch_invariant) {
  check_linear("router_logits", x_TD, router);
  return RouterFunction::apply(x_TD, norm, settings, router, in_model_dtype, batch_invariant);
}

at::Tensor choose_experts(const at::Tensor& logits_TE, int64_t num_chosen) {
  return std::get<1>(at::topk(logits_TE.detach(), num_chosen, /*dim=*/1));
}

at::Tensor expert_weights(const at::Tensor& logits_TE, const at::Tensor& experts_TK, bool renormalise) {
  return renormalise ? at::softmax(logits_TE.gather(1, experts_TK), 1)
                     : at::softmax(logits_TE, 1).gather(1, experts_TK);
}

namespace {

// ---- Pairs of a token and an expert, sorted by expert

struct ExpertRange {
  int64_t expert, begin, size;  // rows of the sorted pairs
};

struct SortedPairs {
  std::vector<ExpertRange> ranges;  // of experts with pairs, ascending
  at::Tensor pairs_P;               // t · K + k of each sorted row
  at::Tensor places_TK;             // the sorted row of each pair
};

// A stable counting sort. It runs on the host, because the products need the sizes there.
SortedPairs sort_by_expert(const at::Tensor& experts_TK, int64_t num_experts) {
  const at::Tensor on_host = experts_TK.cpu().contiguous();
  const int64_t num_tokens = on_host.size(0), num_chosen = on_host.size(1), count = on_host.numel();
  const auto* const expert = data<int64_t>(on_host);
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
  SortedPairs sorted;
  for (int64_t e = 0; e < num_experts; ++e) {
    const auto at_e = static_cast<size_t>(e);
    if (begins[at_e + 1] > 0) sorted.ranges.push_back({e, begins[at_e], begins[at_e + 1]});
    begins[at_e + 1] += begins[at_e];
  }
  const auto options = at::TensorOptions().dtype(at::kLong);
  const at::Tensor pairs_P = at::empty({count}, options);
  const at::Tensor places_TK = at::empty({num_tokens, num_chosen}, options);
  auto *const pairs = mutable_data<int64_t>(pairs_P), *const places = mutable_data<int64_t>(places_TK);
  for (int64_t pair = 0; pair < count; ++pair) {
    const int64_t row = begins[static_cast<size_t>(expert[pair])]++;
    pairs[row] = pair;
    places[pair] = row;
  }
  sorted.pairs_P = pairs_P.to(experts_TK.device());
  sorted.places_TK = places_TK.to(experts_TK.device());
  return sorted;
}

// ---- Ops

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

// ---- The experts

// Returns the rows of expert `e` of a matrix that holds all experts one after another.
at::Tensor expert_rows(const at::Tensor& matrix, int64_t rows, int64_t e) {
  return matrix.defined() ? matrix.narrow(0, e * rows, rows) : matrix;
}

at::Tensor expert_product(const at::Tensor& x_RK, const Parameter& matrix, int64_t rows, int64_t e,
                          bool batch_invariant) {
  const auto weight = expert_rows(matrix.value, rows, e);
  if (matrix.quantized()) return quantized_product(x_RK, weight, expert_rows(matrix.scale, rows, e));
  return batch_invariant ? batch_invariant_product(x_RK, weight.t()) : matrix_product(x_RK, weight.t());
}

at::Tensor tokens_of(const at::Tensor& pairs_P, int64_t num_chosen) {
  return pairs_P.div(num_chosen, "floor");
}

struct ExpertsFunction : torch::autograd::Function<ExpertsFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_TD, const at::Tensor& weights_TK,
                            const at::Tensor& experts_TK, const ExpertsParameters& p, bool batch_invariant) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const int64_t width = x_TD.size(1), inner = p.down.value.size(1);
    const SortedPairs sorted = sort_by_expert(experts_TK, p.down.value.size(0) / width);
    auto h_TD = x_TD;
    at::Tensor rstd;
    if (p.norm) std::tie(h_TD, rstd) = rms_norm_forward(x_TD, p.norm->value, p.norm_settings);
    const auto h_PD = h_TD.index_select(0, tokens_of(sorted.pairs_P, experts_TK.size(1)));
    h_TD.reset();
    variable_list saved = {x_TD, rstd, weights_TK, sorted.pairs_P, sorted.places_TK};
    std::vector<int64_t> ranges;
    at::Tensor out_PD;
    if (p.output_is_read) out_PD = at::empty_like(h_PD);
    for (const auto& [expert, begin, size] : sorted.ranges) {
      const auto gate_up =
          expert_product(h_PD.narrow(0, begin, size), p.gate_up, 2 * inner, expert, batch_invariant);
      if (p.output_is_read)
        out_PD.narrow(0, begin, size)
            .copy_(expert_product(swiglu_forward(gate_up, p.activation), p.down, width, expert,
                                  batch_invariant));
      saved.push_back(gate_up);
      ranges.insert(ranges.end(), {expert, begin, size});
    }
    context->save_for_backward(std::move(saved));
    auto& data = context->saved_data;
    data["ranges"] = ranges;
    data["norm"] = p.norm ? p.norm->value : at::Tensor();
    data["norm_grad"] = p.norm ? p.norm->main_grad : at::Tensor();
    data["weight_offset"] = p.norm_settings.weight_offset;
    data["activation"] = static_cast<int64_t>(p.activation);
    data["gate_up"] = p.gate_up.value;
    data["gate_up_grad"] = p.gate_up.main_grad;
    data["down"] = p.down.value;
    data["down_grad"] = p.down.main_grad;
    data["residual"] = p.residual;
    if (!p.output_is_read) return at::zeros({1, 1}, x_TD.options()).expand({x_TD.size(0), width});
    return add_weighted_rows(out_PD, sorted.places_TK, weights_TK,
                             p.residual ? OptionalTensor(x_TD) : std::nullopt);
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto d_y_TD = d_outputs[0].contiguous();
    const auto saved = context->get_saved_variables();
    const auto &x_TD = saved[0], &rstd = saved[1], &weights_TK = saved[2], &pairs_P = saved[3],
               &places_TK = saved[4];
    auto& data = context->saved_data;
    const auto tensor = [&](const char* name) { return data[name].toTensor(); };
    const auto ranges = data["ranges"].toIntVector();
    const auto gate_up = tensor("gate_up"), gate_up_grad = tensor("gate_up_grad");
    const auto down = tensor("down"), down_grad = tensor("down_grad");
    const auto activation = static_cast<GateActivation>(data["activation"].toInt());
    const int64_t width = x_TD.size(1), inner = down.size(1);
    const auto tokens_P = tokens_of(pairs_P, places_TK.size(1));
    const auto weights_P = weights_TK.flatten().index_select(0, pairs_P);
    const auto d_weights_P = at::empty_like(weights_P);
    auto d_h_PD = at::empty({pairs_P.size(0), width}, x_TD.options());
    {
      const auto d_y_PD = d_y_TD.index_select(0, tokens_P);
      for (size_t i = 0; i < ranges.size(); i += 3) {
        const int64_t expert = ranges[i], begin = ranges[i + 1], size = ranges[i + 2];
        const auto& products = saved[5 + i / 3];  // gate and up; overwritten with their gradients
        const auto d_y = d_y_PD.narrow(0, begin, size);
        const auto d_a = matrix_product(d_y, expert_rows(down, width, expert));
        const auto a = at::empty_like(d_a);
        swiglu_backward(d_a, products, a, products, activation);
        products.unsafeGetTensorImpl()->bump_version();  // marks the saved tensor as overwritten
        d_weights_P.narrow(0, begin, size)
            .copy_(weigh_rows_(a, products, d_a, weights_P.narrow(0, begin, size)));
        add_linear_gradients(expert_rows(down_grad, width, expert), {}, d_y, a);
        d_h_PD.narrow(0, begin, size)
            .copy_(matrix_product(products, expert_rows(gate_up, 2 * inner, expert)));
      }
    }
    const auto d_weights_TK = d_weights_P.index_select(0, places_TK.flatten()).view(places_TK.sizes());
    const auto residual_TD = data["residual"].toBool() ? OptionalTensor(d_y_TD) : std::nullopt;
    at::Tensor d_x_TD, h_TD = x_TD;
    if (rstd.defined()) {
      const auto d_h_TD = add_weighted_rows(d_h_PD, places_TK, std::nullopt, std::nullopt);
      d_x_TD = rms_norm_backward({.d_y = d_h_TD,
                                  .x = x_TD,
                                  .weight_D = tensor("norm"),
                                  .rstd = rstd,
                                  .residual = residual_TD,
                                  .d_weight_D = tensor("norm_grad"),
                                  .y = d_h_TD,
                                  .weight_offset = data["weight_offset"].toDouble()});
      h_TD = d_h_TD;  // rms_norm_backward has written h here
    } else {
      d_x_TD = add_weighted_rows(d_h_PD, places_TK, std::nullopt, residual_TD);
    }
    d_h_PD.reset();
    if (gate_up_grad.defined()) {
      const auto h_PD = h_TD.index_select(0, tokens_P);
      for (size_t i = 0; i < ranges.size(); i += 3)
        add_linear_gradients(expert_rows(gate_up_grad, 2 * inner, ranges[i]), {}, saved[5 + i / 3],
                             h_PD.narrow(0, ranges[i + 1], ranges[i + 2]));
    }
    return {d_x_TD, d_weights_TK, {}, {}, {}};
  }
};

}  // namespace

at::Tensor experts_mlp(const at::Tensor& x_TD, const at::Tensor& experts_TK, const at::Tensor& weights_TK,
                       const ExpertsParameters& p, bool batch_invariant) {
  check_linear("experts_mlp", x_TD, p.gate_up);
  const auto &gate_up = p.gate_up.value, &down = p.down.value;
  BOUGH_CHECK(down.dim() == 2 && down.size(0) % x_TD.size(1) == 0 &&
                  gate_up.size(0) == down.size(0) / x_TD.size(1) * 2 * down.size(1) &&
                  down.scalar_type() == gate_up.scalar_type(),
              "experts_mlp: x ", x_TD.sizes(), ", gate_up ", gate_up.sizes(), ", down ", down.sizes());
  BOUGH_CHECK(experts_TK.dim() == 2 && experts_TK.scalar_type() == at::kLong &&
                  experts_TK.size(0) == x_TD.size(0) && weights_TK.sizes() == experts_TK.sizes() &&
                  weights_TK.scalar_type() == accumulator_type(x_TD.scalar_type()),
              "experts_mlp: experts ", experts_TK.sizes(), " ", experts_TK.scalar_type(), ", weights ",
              weights_TK.sizes(), " ", weights_TK.scalar_type());
  for (const Parameter* matrix : {&p.gate_up, &p.down})
    BOUGH_CHECK(matrix->adapter.empty() && matrix->frozen_adapter.empty(),
                "experts_mlp: experts have no adapters");
  return ExpertsFunction::apply(x_TD, weights_TK.contiguous(), experts_TK, p, batch_invariant);
}

at::Tensor experts_mlp_reference(const at::Tensor& h_TD, const at::Tensor& experts_TK,
                                 const at::Tensor& weights_TK, const at::Tensor& gate_up,
                                 const at::Tensor& down, GateActivation activation) {
  const int64_t width = h_TD.size(1), inner = down.size(1), num_experts = down.size(0) / width;
  auto y_TD = at::zeros_like(h_TD);
  for (int64_t e = 0; e < num_experts; ++e) {
    // The expert's weight for each token, 0 for tokens that do not use it.
    const auto weight_T = (weights_TK * (experts_TK == e)).sum(1);
    const auto parts = at::mm(h_TD, gate_up.narrow(0, e * 2 * inner, 2 * inner).t()).chunk(2, 1);
    const auto gate = activation == GateActivation::kSilu ? at::silu(parts[0]) : at::gelu(parts[0], "tanh");
    y_TD = y_TD + weight_T.unsqueeze(1) * at::mm(gate * parts[1], down.narrow(0, e * width, width).t());
  }
  return y_TD;
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("add_weighted_rows", TORCH_FN(bough::add_weighted_rows_reference));
  m.impl("weigh_rows_", TORCH_FN(bough::weigh_rows_reference_));
}

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("add_weighted_rows", TORCH_FN(bough::add_weighted_rows_cpu));
  m.impl("weigh_rows_", TORCH_FN(bough::weigh_rows_cpu_));
}

#include "kernels/linear/linear.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/quantized_product/quantized_product.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/swiglu/swiglu.h"

namespace bough {

namespace {

at::Tensor slice_columns(const at::Tensor& x_RO, const Parameter::AdapterSlice& slice) {
  return x_RO.narrow(1, slice.begin, slice.end - slice.begin);
}

// Returns u = scale · x · Aᵀ (linear.h) of all slices of the adapter, side by side: [R, slices · rank].
at::Tensor adapter_inner(const at::Tensor& x_RK, const Parameter& weight, bool batch_invariant) {
  const auto product = batch_invariant ? batch_invariant_product : matrix_product;
  auto u = product(x_RK, weight.adapter[0].value.t(), std::nullopt, std::nullopt);
  return weight.adapter_scale == 1 ? u : u.mul_(weight.adapter_scale);
}

// Returns the columns of u that belong to one slice.
at::Tensor inner_columns(const at::Tensor& u, const Parameter& weight, size_t slice) {
  const int64_t rank = weight.adapter[1].value.size(1);
  return u.narrow(1, static_cast<int64_t>(slice) * rank, rank);
}

void add_adapter_(const at::Tensor& y_RO, const at::Tensor& x_RK, const Parameter& weight,
                  bool batch_invariant) {
  if (add_adapter_product_(y_RO, x_RK, weight, batch_invariant)) return;
  const auto u = adapter_inner(x_RK, weight, batch_invariant);
  const Parameter& up = weight.adapter[1];
  for (size_t i = 0; i < weight.adapter_slices.size(); ++i)
    add_matrix_product_(slice_columns(y_RO, weight.adapter_slices[i]), inner_columns(u, weight, i),
                        up.part_value(up.parts[i]).t(), batch_invariant);
}

// The backward of a weight's adapters. add_to_input_() adds to the gradient of the layer's input.
// add_gradients_() takes the input itself and adds to the gradients of A and B. These are two calls, because
// some layers recompute their input only after the gradient of the input. Both do nothing if the weight has
// no adapter. A frozen adapter gets no gradients.
class AdapterBackward {
 public:
  AdapterBackward(const Parameter& weight, const at::Tensor& d_y_RO) {
    for (const Parameter& frozen : weight.frozen_adapter) terms_.push_back(term_of(frozen, d_y_RO));
    if (!weight.adapter.empty()) terms_.push_back(term_of(weight, d_y_RO));
  }
  // weight: the result of adapted().
  AdapterBackward(const c10::IValue& weight, const at::Tensor& d_y_RO) {
    if (const auto* adapted = reinterpret_cast<const Parameter*>(weight.toInt()))
      *this = AdapterBackward(*adapted, d_y_RO);
  }

  void add_to_input_(const at::Tensor& d_x_RK) const {
    for (const Term& term : terms_) add_matrix_product_(d_x_RK, term.d_u, term.weight->adapter[0].value);
  }

  void add_gradients_(const at::Tensor& x_RK) const {
    for (const Term& term : terms_) {
      const Parameter &down = term.weight->adapter[0], &up = term.weight->adapter[1];
      if (!down.main_grad.defined()) continue;
      add_matrix_product_(down.main_grad, term.d_u.t(), x_RK);
      const auto u = adapter_inner(x_RK, *term.weight, false);
      for (size_t i = 0; i < term.d_y_slices.size(); ++i)
        add_matrix_product_(up.part_grad(up.parts[i]), term.d_y_slices[i].t(),
                            inner_columns(u, *term.weight, i));
    }
  }

 private:
  struct Term {  // one adapter
    const Parameter* weight;
    at::Tensor d_u;
    std::vector<at::Tensor> d_y_slices;
  };
  static Term term_of(const Parameter& weight, const at::Tensor& d_y_RO) {
    Term term{.weight = &weight, .d_u = {}, .d_y_slices = {}};
    const Parameter& up = weight.adapter[1];
    std::vector<at::Tensor> d_u;
    for (size_t i = 0; i < weight.adapter_slices.size(); ++i) {
      term.d_y_slices.push_back(slice_columns(d_y_RO, weight.adapter_slices[i]));
      d_u.push_back(matrix_product(term.d_y_slices.back(), up.part_value(up.parts[i])));
    }
    term.d_u = d_u.size() == 1 ? d_u[0] : at::cat(d_u, 1);
    if (weight.adapter_scale != 1) term.d_u.mul_(weight.adapter_scale);
    return term;
  }

  std::vector<Term> terms_;
};

// Returns the argument of AdapterBackward, or 0 if there is no adapter. A pointer is passed as an integer,
// because autograd functions can save only numbers and tensors.
int64_t adapted(const Parameter& weight) {
  const bool has_adapter = !weight.adapter.empty() || !weight.frozen_adapter.empty();
  return has_adapter ? reinterpret_cast<int64_t>(&weight) : 0;
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Parameter& weight,
                            const Parameter* bias, bool batch_invariant,
                            const std::optional<at::Tensor>& residual) {
    at::AutoDispatchBelowADInplaceOrView guard;
    context->save_for_backward({x});
    context->saved_data["weight"] = weight.value;
    context->saved_data["main_grad"] = weight.main_grad;
    context->saved_data["bias_grad"] = bias ? bias->main_grad : at::Tensor();
    context->saved_data["adapted"] = adapted(weight);
    context->saved_data["has_residual"] = residual.has_value();
    return linear_forward(x, weight, bias, batch_invariant, residual);
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto d_y = d_outputs[0].contiguous();
    auto& data = context->saved_data;
    const auto x = context->get_saved_variables()[0];
    add_linear_gradients(data["main_grad"].toTensor(), data["bias_grad"].toTensor(), d_y, x);
    const auto d_x = matrix_product(d_y, data["weight"].toTensor());
    const AdapterBackward adapter(data["adapted"], d_y);
    adapter.add_to_input_(d_x);
    adapter.add_gradients_(x);
    return {d_x, {}, {}, {}, data["has_residual"].toBool() ? d_y : at::Tensor()};
  }
};

void add_adapters_(const at::Tensor& y_RO, const at::Tensor& x_RK, const Parameter& weight,
                   bool batch_invariant) {
  for (const Parameter& frozen : weight.frozen_adapter) add_adapter_(y_RO, x_RK, frozen, batch_invariant);
  if (!weight.adapter.empty()) add_adapter_(y_RO, x_RK, weight, batch_invariant);
}

// linear_forward() and linear_backward() for a y of the accumulator type.
at::Tensor wide_linear_forward(const at::Tensor& x_RK, const Parameter& weight, const Parameter* bias,
                               bool batch_invariant, at::ScalarType y_dtype) {
  BOUGH_CHECK(!weight.quantized() && !bias, "linear_forward: y of ", y_dtype,
              " for a weight that is quantized or has a bias");
  // The right factor is copied into another layout. With few rows of x, this must be x, not the weight.
  constexpr int64_t kFewRows = 128;  // as in matrix_product()
  const int64_t rows = x_RK.size(0), columns = weight.value.size(0);
  const bool turns = rows <= kFewRows;
  auto y_RO = at::zeros({turns ? columns : rows, turns ? rows : columns}, x_RK.options().dtype(y_dtype));
  if (turns) {
    add_matrix_product_(y_RO, weight.value, x_RK.t(), batch_invariant);
    y_RO = y_RO.t().contiguous();
  } else {
    add_matrix_product_(y_RO, x_RK, weight.value.t(), batch_invariant);
  }
  add_adapters_(y_RO, x_RK, weight, batch_invariant);
  return y_RO;
}

at::Tensor wide_linear_backward(const at::Tensor& d_y_RO, const at::Tensor& x_RK, const Parameter& weight) {
  const auto d_x_RK = at::zeros(x_RK.sizes(), d_y_RO.options());
  const auto leading_RO = d_y_RO.to(x_RK.scalar_type());
  for (const at::Tensor& part_RO : {leading_RO, d_y_RO.sub(leading_RO).to(x_RK.scalar_type())}) {
    add_linear_gradients(weight.main_grad, {}, part_RO, x_RK);
    add_matrix_product_(d_x_RK, part_RO, weight.value);
    const AdapterBackward adapter(weight, part_RO);
    adapter.add_to_input_(d_x_RK);
    adapter.add_gradients_(x_RK);
  }
  return d_x_RK;
}
}  // namespace

void check_linear(const char* op, const at::Tensor& x_RK, const Parameter& weight) {
  BOUGH_CHECK(x_RK.dim() == 2 && weight.value.dim() == 2 && x_RK.size(1) == weight.value.size(1) &&
                  (weight.quantized() || x_RK.scalar_type() == weight.value.scalar_type()),
              op, ": x ", x_RK.sizes(), " ", x_RK.scalar_type(), ", weight ", weight.value.sizes(), " ",
              weight.value.scalar_type());
  BOUGH_CHECK(!weight.quantized() || !at::GradMode::is_enabled(), op,
              ": a quantized weight has no gradient, but autograd is recording");
}

at::Tensor linear_forward(const at::Tensor& x_RK, const Parameter& weight, const Parameter* bias,
                          bool batch_invariant, const std::optional<at::Tensor>& residual_RO,
                          std::optional<at::ScalarType> y_dtype) {
  if (y_dtype && *y_dtype != x_RK.scalar_type())
    return wide_linear_forward(x_RK, weight, bias, batch_invariant, *y_dtype);
  const auto bias_O = bias ? std::optional(bias->value) : std::nullopt;
  const auto product = batch_invariant ? batch_invariant_product : matrix_product;
  const auto y_RO = weight.quantized()  // quantized_product is always batch-invariant
                        ? quantized_product(x_RK, weight.value, weight.scale, bias_O, residual_RO)
                        : product(x_RK, weight.value.t(), bias_O, residual_RO);
  add_adapters_(y_RO, x_RK, weight, batch_invariant);
  return y_RO;
}

at::Tensor linear_backward(const at::Tensor& d_y_RO, const at::Tensor& x_RK, const Parameter& weight) {
  if (d_y_RO.scalar_type() != x_RK.scalar_type()) return wide_linear_backward(d_y_RO, x_RK, weight);
  add_linear_gradients(weight.main_grad, {}, d_y_RO, x_RK);
  const auto d_x_RK = matrix_product(d_y_RO, weight.value);
  const AdapterBackward adapter(weight, d_y_RO);
  adapter.add_to_input_(d_x_RK);
  adapter.add_gradients_(x_RK);
  return d_x_RK;
}

void add_linear_gradients(const at::Tensor& weight_grad_OK, const at::Tensor& bias_grad_O,
                          const at::Tensor& d_y_RO, const at::Tensor& x_RK) {
  if (weight_grad_OK.defined()) add_matrix_product_(weight_grad_OK, d_y_RO.t(), x_RK);
  if (bias_grad_O.defined()) bias_grad_O.add_(at::sum(d_y_RO, {0}, false, bias_grad_O.scalar_type()));
}

at::Tensor linear(const at::Tensor& x_RK, const Parameter& weight, const Parameter* bias,
                  bool batch_invariant, const std::optional<at::Tensor>& residual_RO) {
  check_linear("linear", x_RK, weight);
  return LinearFunction::apply(x_RK, weight, bias, batch_invariant, residual_RO);
}

namespace {
struct NormLinearFunction : torch::autograd::Function<NormLinearFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const Parameter& norm,
                               const NormSettings& settings, const Parameter& weight, const Parameter* bias,
                               bool batch_invariant) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [h, rstd] = rms_norm_forward(x, norm.value, settings);
    context->save_for_backward({x, rstd});
    context->set_materialize_grads(false);
    auto& data = context->saved_data;
    data["norm"] = norm.value;
    data["norm_grad"] = norm.main_grad;
    data["weight_offset"] = settings.weight_offset;
    data["weight"] = weight.value;
    data["weight_grad"] = weight.main_grad;
    data["adapted"] = adapted(weight);
    data["bias_grad"] = bias ? bias->main_grad : at::Tensor();
    return {linear_forward(h, weight, bias, batch_invariant), x.detach()};
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto& d_residual = d_outputs[1];
    // If y received no gradient, d_x is only the residual's gradient.
    if (!d_outputs[0].defined()) return {d_residual, {}, {}, {}, {}, {}};
    const auto d_y = d_outputs[0].contiguous();
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const auto d_h = matrix_product(d_y, data["weight"].toTensor());
    const AdapterBackward adapter(data["adapted"], d_y);
    adapter.add_to_input_(d_h);
    const auto d_x = rms_norm_backward(
        {.d_y = d_h,
         .x = saved[0],
         .weight_D = data["norm"].toTensor(),
         .rstd = saved[1],
         .residual = d_residual.defined() ? std::optional(d_residual.contiguous()) : std::nullopt,
         .d_weight_D = data["norm_grad"].toTensor(),
         .y = d_h,
         .weight_offset = data["weight_offset"].toDouble()});
    const auto& h = d_h;  // rms_norm_backward has written h here
    add_linear_gradients(data["weight_grad"].toTensor(), data["bias_grad"].toTensor(), d_y, h);
    adapter.add_gradients_(h);
    return {d_x, {}, {}, {}, {}, {}};
  }
};
}  // namespace

NormLinearOutput norm_linear(const at::Tensor& x_RD, const Parameter& norm, const NormSettings& settings,
                             const Parameter& weight, const Parameter* bias, bool batch_invariant) {
  check_linear("norm_linear", x_RD, weight);
  const auto outputs = NormLinearFunction::apply(x_RD, norm, settings, weight, bias, batch_invariant);
  return {outputs[0], outputs[1]};
}

namespace {
struct MlpFunction : torch::autograd::Function<MlpFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_TD, const MlpParameters& parameters,
                            bool batch_invariant) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto& p = parameters;
    auto h_TD = x_TD;
    at::Tensor rstd;
    if (p.norm) std::tie(h_TD, rstd) = rms_norm_forward(x_TD, p.norm->value, p.norm_settings);
    const auto gate_up_TF2 = linear_forward(h_TD, p.gate_up, p.gate_up_bias, batch_invariant);
    h_TD.reset();
    context->save_for_backward({x_TD, rstd, gate_up_TF2});
    auto& data = context->saved_data;
    data["norm"] = p.norm ? p.norm->value : at::Tensor();
    data["norm_grad"] = p.norm ? p.norm->main_grad : at::Tensor();
    data["weight_offset"] = p.norm_settings.weight_offset;
    data["activation"] = static_cast<int64_t>(p.activation);
    data["gate_up"] = p.gate_up.value;
    data["gate_up_grad"] = p.gate_up.main_grad;
    data["gate_up_bias_grad"] = p.gate_up_bias ? p.gate_up_bias->main_grad : at::Tensor();
    data["down"] = p.down.value;
    data["down_grad"] = p.down.main_grad;
    data["down_bias_grad"] = p.down_bias ? p.down_bias->main_grad : at::Tensor();
    data["gate_up_adapted"] = adapted(p.gate_up);
    data["down_adapted"] = adapted(p.down);
    data["residual"] = p.residual;
    if (!p.output_is_read)
      return at::zeros({1, 1}, x_TD.options()).expand({x_TD.size(0), p.down.value.size(0)});
    return linear_forward(swiglu_forward(gate_up_TF2, p.activation), p.down, p.down_bias, batch_invariant,
                          p.residual ? std::optional(x_TD) : std::nullopt);
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto d_y_TD = d_outputs[0].contiguous();
    const auto saved = context->get_saved_variables();
    const auto &x_TD = saved[0], &rstd = saved[1], &gate_up_TF2 = saved[2];
    auto& data = context->saved_data;
    const auto gradient = [&](const char* name) { return data[name].toTensor(); };
    const auto residual_TD = data["residual"].toBool() ? std::optional(d_y_TD) : std::nullopt;
    {
      const auto d_a_TF = matrix_product(d_y_TD, data["down"].toTensor());
      const AdapterBackward adapter(data["down_adapted"], d_y_TD);
      adapter.add_to_input_(d_a_TF);
      swiglu_backward(d_a_TF, gate_up_TF2, /*y_TF=*/d_a_TF, /*d_gate_up_TF2=*/gate_up_TF2,
                      static_cast<GateActivation>(data["activation"].toInt()));
      gate_up_TF2.unsafeGetTensorImpl()->bump_version();  // marks the saved tensor as overwritten
      const auto& a_TF = d_a_TF;
      add_linear_gradients(gradient("down_grad"), gradient("down_bias_grad"), d_y_TD, a_TF);
      adapter.add_gradients_(a_TF);
    }
    const auto& d_gate_up_TF2 = gate_up_TF2;
    const auto& gate_up = data["gate_up"].toTensor();
    const AdapterBackward adapter(data["gate_up_adapted"], d_gate_up_TF2);
    if (!rstd.defined()) {
      const auto d_x_TD = matrix_product(d_gate_up_TF2, gate_up, std::nullopt, residual_TD);
      adapter.add_to_input_(d_x_TD);
      add_linear_gradients(gradient("gate_up_grad"), gradient("gate_up_bias_grad"), d_gate_up_TF2, x_TD);
      adapter.add_gradients_(x_TD);
      return {d_x_TD, {}, {}};
    }
    const auto d_h_TD = matrix_product(d_gate_up_TF2, gate_up);
    adapter.add_to_input_(d_h_TD);
    const auto d_x_TD = rms_norm_backward({.d_y = d_h_TD,
                                           .x = x_TD,
                                           .weight_D = data["norm"].toTensor(),
                                           .rstd = rstd,
                                           .residual = residual_TD,
                                           .d_weight_D = gradient("norm_grad"),
                                           .y = d_h_TD,
                                           .weight_offset = data["weight_offset"].toDouble()});
    const auto& h_TD = d_h_TD;
    add_linear_gradients(gradient("gate_up_grad"), gradient("gate_up_bias_grad"), d_gate_up_TF2, h_TD);
    adapter.add_gradients_(h_TD);
    return {d_x_TD, {}, {}};
  }
};
}  // namespace

at::Tensor mlp(const at::Tensor& x_TD, const MlpParameters& parameters, bool batch_invariant) {
  check_linear("mlp", x_TD, parameters.gate_up);
  const auto &gate_up = parameters.gate_up.value, &down = parameters.down.value;
  BOUGH_CHECK(down.dim() == 2 && down.size(0) == x_TD.size(1) && gate_up.size(0) == 2 * down.size(1) &&
                  down.scalar_type() == gate_up.scalar_type(),
              "mlp: x ", x_TD.sizes(), " ", x_TD.scalar_type(), ", gate_up ", gate_up.sizes(), ", down ",
              down.sizes(), " ", down.scalar_type());
  return MlpFunction::apply(x_TD, parameters, batch_invariant);
}

}  // namespace bough

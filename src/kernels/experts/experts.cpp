#include "kernels/experts/experts.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/custom_class.h>

#include <vector>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/common/cuda_library.h"
#include "kernels/common/device.h"
#include "kernels/experts/expert_pairs.h"
#include "kernels/linear/linear.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/quantized_product/quantized_product.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/swiglu/swiglu.h"

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

// ---- The experts

// Returns the rows of expert `e` of a matrix that holds all experts one after another.
at::Tensor expert_rows(const at::Tensor& matrix, int64_t rows, int64_t e) {
  return matrix.defined() ? matrix.narrow(0, e * rows, rows) : matrix;
}

// The rows of all experts together.
constexpr int64_t kAllExperts = -1;

// The numbers of rows of the experts, copied to the host without waiting.
class EndsOnHost : public torch::CustomClassHolder {
 public:
  explicit EndsOnHost(const at::Tensor& ends_E)
      : ends_E_(at::empty(ends_E.sizes(), at::TensorOptions().dtype(at::kInt).pinned_memory(true))),
        arrived_(ends_E.device().type()) {
    ends_E_.copy_(ends_E, /*non_blocking=*/true);
    arrived_.record(c10::impl::VirtualGuardImpl(ends_E.device().type()).getStream(ends_E.device()));
  }
  const at::Tensor& wait() {
    arrived_.synchronize();
    return ends_E_;
  }

 private:
  at::Tensor ends_E_;
  c10::Event arrived_;
};

// x times the transposed weights of its rows' experts.
at::Tensor expert_product(const at::Tensor& x_RK, const Parameter& matrix, int64_t outputs, int64_t expert,
                          const at::Tensor& ends_E, bool batch_invariant) {
  if (expert == kAllExperts) return grouped_product(x_RK, matrix.value, ends_E, /*is_transposed=*/true);
  const auto weight = expert_rows(matrix.value, outputs, expert);
  if (matrix.quantized()) return quantized_product(x_RK, weight, expert_rows(matrix.scale, outputs, expert));
  return batch_invariant ? batch_invariant_product(x_RK, weight.t()) : matrix_product(x_RK, weight.t());
}

// x times the weights of its rows' experts, each [rows, O].
at::Tensor backward_product(const at::Tensor& x_RK, const at::Tensor& matrix, int64_t rows, int64_t expert,
                            const at::Tensor& ends_E) {
  if (expert == kAllExperts) return grouped_product(x_RK, matrix, ends_E, /*is_transposed=*/false);
  return matrix_product(x_RK, expert_rows(matrix, rows, expert));
}

// Adds the gradient of the experts' matrix, each [rows, K]. d_y, x: the sorted rows from `first` on.
void add_expert_gradients(const at::Tensor& matrix_grad, int64_t rows, const std::vector<ExpertRows>& experts,
                          const at::Tensor& d_y, const at::Tensor& x, int64_t first = 0) {
  for (const auto& [expert, begin, size] : experts)
    add_linear_gradients(expert_rows(matrix_grad, rows, expert), {}, d_y.narrow(0, begin - first, size),
                         x.narrow(0, begin - first, size));
}

at::Tensor tokens_of(const at::Tensor& pairs_P, int64_t num_chosen) {
  return pairs_P.div(num_chosen, "floor");
}

// Computes experts of few rows, each by one thread, and returns how many: a multiple of the threads. Threads
// that compute a product of few rows together wait for each other about as long as they compute.
template <class Compute>
size_t compute_beside_each_other(const std::vector<ExpertRows>& experts, int64_t num_rows,
                                 Compute&& compute) {
  constexpr int64_t kFewRows = 8;  // of an expert, on average
  const auto threads = static_cast<size_t>(at::get_num_threads());
  const size_t count = experts.size() / threads * threads;
  if (threads == 1 || count == 0 || num_rows > kFewRows * std::ssize(experts)) return 0;
  at::parallel_for(0, static_cast<int64_t>(count), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) compute(experts[static_cast<size_t>(i)]);
  });
  return count;
}

struct ExpertsFunction : torch::autograd::Function<ExpertsFunction> {
  // records: whether backward will run.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_TD, const at::Tensor& weights_TK,
                            const at::Tensor& experts_TK, const ExpertsParameters& p, bool batch_invariant,
                            bool records) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const int64_t width = x_TD.size(1), inner = p.down.value.size(1);
    const int64_t num_experts = p.down.value.size(0) / width;
    const auto [pairs_P, places_TK, ends_E] = sort_pairs(experts_TK, num_experts);
    auto& data = context->saved_data;
    // Products of all experts at once, or of one expert after another. The latter need the numbers of rows.
    std::vector<ExpertRows> parts;
    if (groups_on_device(x_TD.device(), p.gate_up.value.scalar_type(), num_experts, width, inner)) {
      if (pairs_P.numel() > 0) parts = {{kAllExperts, 0, pairs_P.numel()}};
      if (records) data["ends"] = c10::IValue::make_capsule(c10::make_intrusive<EndsOnHost>(ends_E));
    } else {
      parts = rows_of_experts(ends_E.cpu(), pairs_P.numel());
    }
    auto h_TD = x_TD;
    at::Tensor rstd;
    if (p.norm) std::tie(h_TD, rstd) = rms_norm_forward(x_TD, p.norm->value, p.norm_settings);
    const auto h_PD = h_TD.index_select(0, tokens_of(pairs_P, experts_TK.size(1)));
    h_TD.reset();
    variable_list saved = {x_TD, rstd, weights_TK, pairs_P, places_TK, ends_E};
    std::vector<int64_t> ranges;
    at::Tensor out_PD;
    if (p.output_is_read && parts.size() != 1) out_PD = at::empty_like(h_PD);
    const auto compute = [&](const ExpertRows& part) {
      at::AutoDispatchBelowADInplaceOrView of_this_thread;
      const auto& [expert, begin, size] = part;
      const auto gate_up =
          expert_product(h_PD.narrow(0, begin, size), p.gate_up, 2 * inner, expert, ends_E, batch_invariant);
      if (p.output_is_read) {
        const auto out = expert_product(swiglu_forward(gate_up, p.activation), p.down, width, expert, ends_E,
                                        batch_invariant);
        if (out_PD.defined()) out_PD.narrow(0, begin, size).copy_(out);
        else out_PD = out;
      }
      return gate_up;
    };
    size_t i = 0;
    if (!records && x_TD.is_cpu()) i = compute_beside_each_other(parts, pairs_P.numel(), compute);
    for (; i < parts.size(); ++i) {
      saved.push_back(compute(parts[i]));
      ranges.insert(ranges.end(), {parts[i].expert, parts[i].begin, parts[i].size});
    }
    context->save_for_backward(std::move(saved));
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
    return add_weighted_rows(out_PD, places_TK, weights_TK, p.residual ? OptionalTensor(x_TD) : std::nullopt);
  }

  // Returns the rows of the experts of part `i`.
  static std::vector<ExpertRows> experts_of_part(AutogradContext* context, const std::vector<int64_t>& ranges,
                                                 size_t i) {
    const ExpertRows part{ranges[i], ranges[i + 1], ranges[i + 2]};
    if (part.expert != kAllExperts) return {part};
    const auto ends = context->saved_data["ends"].toCapsule();
    return rows_of_experts(static_cast<EndsOnHost&>(*ends).wait(), part.size);
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto d_y_TD = d_outputs[0].contiguous();
    const auto saved = context->get_saved_variables();
    const auto &x_TD = saved[0], &rstd = saved[1], &weights_TK = saved[2], &pairs_P = saved[3],
               &places_TK = saved[4], &ends_E = saved[5];
    constexpr size_t kFirst = 6;  // of the saved products
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
    at::Tensor d_h_PD;
    if (ranges.size() != 3) d_h_PD = at::empty({pairs_P.size(0), width}, x_TD.options());
    {
      const auto d_y_PD = d_y_TD.index_select(0, tokens_P);
      for (size_t i = 0; i < ranges.size(); i += 3) {
        const int64_t expert = ranges[i], begin = ranges[i + 1], size = ranges[i + 2];
        const auto& products = saved[kFirst + i / 3];  // gate and up; overwritten with their gradients
        const auto d_y = d_y_PD.narrow(0, begin, size);
        const auto d_a = backward_product(d_y, down, width, expert, ends_E);
        const auto a = at::empty_like(d_a);
        swiglu_backward(d_a, products, a, products, activation);
        products.unsafeGetTensorImpl()->bump_version();  // marks the saved tensor as overwritten
        d_weights_P.narrow(0, begin, size)
            .copy_(weigh_rows_(a, products, d_a, weights_P.narrow(0, begin, size)));
        if (down_grad.defined())
          add_expert_gradients(down_grad, width, experts_of_part(context, ranges, i), d_y, a, begin);
        const auto d_h = backward_product(products, gate_up, 2 * inner, expert, ends_E);
        if (d_h_PD.defined()) d_h_PD.narrow(0, begin, size).copy_(d_h);
        else d_h_PD = d_h;
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
        add_expert_gradients(gate_up_grad, 2 * inner, experts_of_part(context, ranges, i),
                             saved[kFirst + i / 3], h_PD.narrow(0, ranges[i + 1], ranges[i + 2]),
                             ranges[i + 1]);
    }
    return {d_x_TD, d_weights_TK, {}, {}, {}, {}};
  }
};

}  // namespace

bool groups_on_device(at::Device device, at::ScalarType type, int64_t num_experts, int64_t width,
                      int64_t inner) {
  // The limits of at::_grouped_mm: rows of whole 16 bytes, and GPUs for which it has kernels.
  if (!device.is_cuda() || type != at::kBFloat16 || !has_cuda_kernel("bough::grouped_product")) return false;
  const int generation = compute_capability(device) / 10;
  return (generation == 9 || generation == 10) && num_experts < 1024 && width % 8 == 0 && inner % 8 == 0;
}

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
  const bool records = at::GradMode::is_enabled() && (x_TD.requires_grad() || weights_TK.requires_grad());
  return ExpertsFunction::apply(x_TD, weights_TK.contiguous(), experts_TK, p, batch_invariant, records);
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

// libbough_cuda.so: the CUDA kernels as torch ops. The library links libtorch_cuda and is opened at run time
// (cuda_library.h). Ops without a kernel here run their reference, written in tensor ops, on the device. Ops
// with more than one kernel have their own file, x_cuda_ops.cpp.
//
// Every op runs on the current stream of its tensors' device. No op waits for the device.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "kernels/adamw/adamw.h"
#include "kernels/common/cuda_launch.h"
#include "kernels/common/cuda_launchers.h"
#include "kernels/common/op.h"
#include "kernels/log_prob/log_prob.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/parameter.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary.h"
#include "kernels/quantized_product/quantized_product.h"

namespace bough {

namespace {
using Tensor = const at::Tensor&;
using OptionalTensor = std::optional<at::Tensor>;

template <class T>
const T* optional_data(const OptionalTensor& tensor) {
  return tensor ? data<T>(*tensor) : nullptr;
}
template <class T>
T* optional_mutable_data(const OptionalTensor& tensor) {
  return tensor ? mutable_data<T>(*tensor) : nullptr;
}

std::vector<at::Tensor> with_defined(std::vector<at::Tensor> tensors,
                                     std::initializer_list<OptionalTensor> optional) {
  for (const auto& tensor : optional)
    if (tensor) tensors.push_back(*tensor);
  return tensors;
}

std::tuple<at::Tensor, at::Tensor> rms_norm_forward_op(Tensor x, Tensor weight_D, double eps,
                                                       double weight_offset) {
  const Launch launch("rms_norm", {x, weight_D});
  const int64_t width = x.size(-1);
  const int64_t num_rows = width ? x.numel() / width : 0;
  auto y = at::empty_like(x);
  auto rstd = at::empty({num_rows}, x.options().dtype(accumulator_type(x.scalar_type())));
  dispatch_float_types(x.scalar_type(), "rms_norm", [&]<class T>() {
    rms_norm_forward_cuda(mutable_data<T>(y), mutable_data<AccOf<T>>(rstd), data<T>(x), data<T>(weight_D),
                          num_rows, width, {eps, weight_offset}, launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {y, rstd};
}

at::Tensor rms_norm_backward_op(Tensor d_y, Tensor x, Tensor weight_D, Tensor rstd,
                                const OptionalTensor& residual, Tensor d_weight_D, const OptionalTensor& y,
                                double weight_offset) {
  const Launch launch("rms_norm", with_defined({d_y, x, weight_D, rstd, d_weight_D}, {residual, y}));
  const int64_t num_rows = rstd.numel();
  auto d_x = at::empty_like(x);
  auto partial = at::empty({rms_norm_num_parts(num_rows), x.size(-1)}, rstd.options());
  dispatch_float_types(x.scalar_type(), "rms_norm", [&]<class T>() {
    using A = AccOf<T>;
    rms_norm_backward_cuda(RmsNormBackward<T, A>{.d_x = mutable_data<T>(d_x),
                                                 .y = optional_mutable_data<T>(y),
                                                 .d_weight = mutable_data<A>(d_weight_D),
                                                 .partial = mutable_data<A>(partial),
                                                 .d_y = data<T>(d_y),
                                                 .x = data<T>(x),
                                                 .weight = data<T>(weight_D),
                                                 .residual = optional_data<T>(residual),
                                                 .rstd = data<A>(rstd),
                                                 .num_rows = num_rows,
                                                 .width = x.size(-1),
                                                 .weight_offset = static_cast<A>(weight_offset)},
                           launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return d_x;
}

at::Tensor swiglu_forward_op(Tensor gate_up_TF2, int64_t activation) {
  const Launch launch("swiglu", {gate_up_TF2});
  const int64_t width = gate_up_TF2.size(1) / 2;
  auto y_TF = at::empty({gate_up_TF2.size(0), width}, gate_up_TF2.options());
  dispatch_float_types(gate_up_TF2.scalar_type(), "swiglu", [&]<class T>() {
    swiglu_forward_cuda(mutable_data<T>(y_TF), data<T>(gate_up_TF2), y_TF.size(0), width,
                        static_cast<GateActivation>(activation), launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y_TF;
}

void swiglu_backward_op(Tensor d_y_TF, Tensor gate_up_TF2, Tensor y_TF, Tensor d_gate_up_TF2,
                        int64_t activation) {
  const Launch launch("swiglu", {d_y_TF, gate_up_TF2, y_TF, d_gate_up_TF2});
  dispatch_float_types(gate_up_TF2.scalar_type(), "swiglu", [&]<class T>() {
    swiglu_backward_cuda(mutable_data<T>(d_gate_up_TF2), mutable_data<T>(y_TF), data<T>(d_y_TF),
                         data<T>(gate_up_TF2), d_y_TF.size(0), d_y_TF.size(1),
                         static_cast<GateActivation>(activation), launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T>
QkNormRotaryInput<T, AccOf<T>> qk_input(Tensor qkv, Tensor cos, Tensor sin, const OptionalTensor& q_norm,
                                        const OptionalTensor& k_norm, const QkvLayout& layout,
                                        const NormSettings& norm) {
  return {.qkv = data<T>(qkv),
          .cos = data<AccOf<T>>(cos),
          .sin = data<AccOf<T>>(sin),
          .q_norm = optional_data<T>(q_norm),
          .k_norm = optional_data<T>(k_norm),
          .num_tokens = qkv.size(0),
          .num_heads = layout.num_heads,
          .num_kv_heads = layout.num_kv_heads,
          .head_dim = layout.head_dim,
          .num_pairs = cos.size(1),
          .eps = static_cast<AccOf<T>>(norm.eps),
          .weight_offset = static_cast<AccOf<T>>(norm.weight_offset)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rotary_forward_op(
    Tensor qkv, Tensor cos, Tensor sin, const OptionalTensor& q_norm, const OptionalTensor& k_norm,
    int64_t num_heads, int64_t num_kv_heads, double eps, double weight_offset) {
  const Launch launch("qk_norm_rotary", with_defined({qkv, cos, sin}, {q_norm, k_norm}));
  const int64_t head_dim = qkv.size(1) / (num_heads + 2 * num_kv_heads);
  auto q = at::empty({qkv.size(0), num_heads, head_dim}, qkv.options());
  auto k = at::empty({qkv.size(0), num_kv_heads, head_dim}, qkv.options());
  auto v = at::empty_like(k);
  dispatch_float_types(qkv.scalar_type(), "qk_norm_rotary", [&]<class T>() {
    const auto input =
        qk_input<T>(qkv, cos, sin, q_norm, k_norm, {num_heads, num_kv_heads, head_dim}, {eps, weight_offset});
    qk_norm_rotary_forward_cuda(input, mutable_data<T>(q), mutable_data<T>(k), mutable_data<T>(v),
                                launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {q, k, v};
}

at::Tensor qk_norm_rotary_backward_op(Tensor d_q, Tensor d_k, Tensor d_v, Tensor qkv, Tensor cos, Tensor sin,
                                      const OptionalTensor& q_norm, const OptionalTensor& k_norm,
                                      const OptionalTensor& d_q_norm, const OptionalTensor& d_k_norm,
                                      double eps, double weight_offset) {
  const Launch launch("qk_norm_rotary",
                      with_defined({qkv, cos, sin, d_q, d_k, d_v}, {q_norm, k_norm, d_q_norm, d_k_norm}));
  const int64_t head_dim = d_q.size(2);
  const int64_t num_heads = d_q.size(1);
  const int64_t num_kv_heads = d_k.size(1);
  auto d_qkv = at::empty_like(qkv);
  OptionalTensor partial;
  if (q_norm) {
    const int64_t limit = qk_norm_rotary_max_head_dim(static_cast<int64_t>(cos.element_size()));
    BOUGH_CHECK(d_q_norm && d_k_norm && head_dim <= limit, "qk_norm_rotary: head_dim ", head_dim,
                " of at most ", limit, ", gradients of the norms ", d_q_norm ? "given" : "missing");
    partial = at::empty({qk_norm_rotary_num_parts(qkv.size(0), num_heads, num_kv_heads), 2, head_dim},
                        cos.options());
  }
  dispatch_float_types(qkv.scalar_type(), "qk_norm_rotary", [&]<class T>() {
    using A = AccOf<T>;
    const auto input =
        qk_input<T>(qkv, cos, sin, q_norm, k_norm, {num_heads, num_kv_heads, head_dim}, {eps, weight_offset});
    qk_norm_rotary_backward_cuda(input,
                                 QkNormRotaryGradient<T, A>{.d_q = data<T>(d_q),
                                                            .d_k = data<T>(d_k),
                                                            .d_v = data<T>(d_v),
                                                            .d_qkv = mutable_data<T>(d_qkv),
                                                            .d_q_norm = optional_mutable_data<A>(d_q_norm),
                                                            .d_k_norm = optional_mutable_data<A>(d_k_norm),
                                                            .partial = optional_mutable_data<A>(partial)},
                                 launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return d_qkv;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> log_prob_forward_op(Tensor logits_RV, Tensor labels_R,
                                                                   double temperature) {
  const Launch launch("log_prob", {logits_RV, labels_R});
  const auto options = logits_RV.options().dtype(accumulator_type(logits_RV.scalar_type()));
  auto log_probs = at::empty({logits_RV.size(0)}, options);
  auto lse = at::empty_like(log_probs);
  auto entropies = at::empty_like(log_probs);
  dispatch_float_types(logits_RV.scalar_type(), "log_prob", [&]<class T>() {
    using A = AccOf<T>;
    log_prob_forward_cuda(LogProbForward<T, A>{.log_probs = mutable_data<A>(log_probs),
                                               .lse = mutable_data<A>(lse),
                                               .entropies = mutable_data<A>(entropies),
                                               .logits = data<T>(logits_RV),
                                               .labels = data<int64_t>(labels_R),
                                               .num_rows = logits_RV.size(0),
                                               .width = logits_RV.size(1),
                                               .temperature = temperature},
                          launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {log_probs, lse, entropies};
}

void log_prob_backward_op(Tensor logits_RV, Tensor labels_R, Tensor lse, Tensor entropies, Tensor d_log_probs,
                          Tensor d_entropies, double temperature) {
  const Launch launch("log_prob", {logits_RV, labels_R, lse, entropies, d_log_probs, d_entropies});
  dispatch_float_types(logits_RV.scalar_type(), "log_prob", [&]<class T>() {
    using A = AccOf<T>;
    log_prob_backward_cuda(LogProbBackward<T, A>{.logits = mutable_data<T>(logits_RV),
                                                 .labels = data<int64_t>(labels_R),
                                                 .lse = data<A>(lse),
                                                 .entropies = data<A>(entropies),
                                                 .d_log_probs = data<A>(d_log_probs),
                                                 .d_entropies = data<A>(d_entropies),
                                                 .num_rows = logits_RV.size(0),
                                                 .width = logits_RV.size(1),
                                                 .temperature = temperature},
                           launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor sum_of_squares_op(Tensor x) {
  const Launch launch("sum_of_squares", {x});
  const auto options = x.options().dtype(at::kDouble);
  auto result = at::empty({}, options);
  auto partial = at::empty({sum_of_squares_num_parts(x.numel())}, options);
  dispatch_float_types(x.scalar_type(), "sum_of_squares", [&]<class T>() {
    sum_of_squares_cuda(mutable_data<double>(result), mutable_data<double>(partial), data<T>(x), x.numel(),
                        launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return result;
}

void add_embedding_gradient_op(Tensor sums_VD, Tensor tokens_T, Tensor rows_TD) {
  const Launch launch("add_embedding_gradient_", {sums_VD, tokens_T, rows_TD});
  const auto [tokens, order] = at::sort(tokens_T, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  dispatch_float_types(rows_TD.scalar_type(), "embedding", [&]<class T>() {
    using A = AccOf<T>;
    add_embedding_gradient_cuda(EmbeddingGradient<T, A>{.sums = mutable_data<A>(sums_VD),
                                                        .tokens = data<int64_t>(tokens),
                                                        .order = data<int64_t>(order),
                                                        .rows = data<T>(rows_TD),
                                                        .num_rows = rows_TD.size(0),
                                                        .width = rows_TD.size(1)},
                                launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void adamw_op(Tensor value, const OptionalTensor& master, Tensor exp_avg, Tensor exp_avg_sq, Tensor gradient,
              double lr, double beta1, double beta2, double eps, double weight_decay, double gradient_scale,
              int64_t step) {
  const Launch launch("adamw", with_defined({value, exp_avg, exp_avg_sq, gradient}, {master}));
  dispatch_float_types(value.scalar_type(), "adamw", [&]<class T>() {
    using A = AccOf<T>;
    const auto scalars = adamw_scalars<A>({lr, beta1, beta2, eps, weight_decay, gradient_scale, step});
    adamw_cuda(AdamwArrays<T, A>{.value = mutable_data<T>(value),
                                 .master = optional_mutable_data<A>(master),
                                 .exp_avg = mutable_data<A>(exp_avg),
                                 .exp_avg_sq = mutable_data<A>(exp_avg_sq),
                                 .gradient = mutable_data<A>(gradient),
                                 .size = value.numel()},
               scalars, launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor draw_token_op(const at::Tensor& logits_RV, const at::Tensor& requests) {
  const Launch launch("draw_token", {logits_RV, requests});
  auto drawn = at::empty({requests.size(0), kDrawnNumbers}, requests.options());
  dispatch_float_types(logits_RV.scalar_type(), "draw_token", [&]<class T>() {
    draw_token_cuda(DrawTokenCuda<T>{.drawn = mutable_data<double>(drawn),
                                     .logits = data<T>(logits_RV),
                                     .requests = data<double>(requests),
                                     .num_draws = requests.size(0),
                                     .width = logits_RV.size(1)},
                    launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return drawn;
}

// Most rows for the kernel of quantized_product, which serves bf16 and the few rows of decoding. Up to this
// many rows, the kernel reads the weight once. With more rows, each block reads its 64 rows from the L2 cache
// for 16 outputs. At an H100's rate (5.5 TB/s) this takes, from about 65 rows on, as long as widening the
// weight exactly for cuBLAS (5 bytes an element at 3.35 TB/s).
constexpr int64_t kFewRows = 64;

void quantize_rows_op(Tensor quantized_OK, Tensor scale_O, Tensor weight_OK) {
  const Launch launch("quantize_rows_", {quantized_OK, scale_O, weight_OK});
  if (weight_OK.numel() == 0) return quantize_rows_reference_(quantized_OK, scale_O, weight_OK);
  dispatch_float_types(weight_OK.scalar_type(), "quantize_rows_", [&]<class T>() {
    quantize_rows_cuda(mutable_data<int8_t>(quantized_OK), mutable_data<float>(scale_O), data<T>(weight_OK),
                       weight_OK.size(0), weight_OK.size(1), launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor product_of_many_rows(Tensor x_RK, Tensor weight_OK, Tensor scale_O, const OptionalTensor& bias_O,
                                const OptionalTensor& residual_RO) {
  const auto sums_RO = at::zeros({x_RK.size(0), weight_OK.size(0)}, scale_O.options());
  add_matrix_product_(sums_RO, x_RK, weight_OK.to(x_RK.scalar_type()).t());
  sums_RO.mul_(scale_O);
  if (bias_O) sums_RO.add_(*bias_O);
  if (residual_RO) sums_RO.add_(*residual_RO);
  return sums_RO.to(x_RK.scalar_type());
}

at::Tensor quantized_product_op(Tensor x_RK, Tensor weight_OK, Tensor scale_O, const OptionalTensor& bias_O,
                                const OptionalTensor& residual_RO) {
  if (x_RK.scalar_type() != at::kBFloat16 || x_RK.numel() == 0 || weight_OK.numel() == 0)
    return quantized_product_reference(x_RK, weight_OK, scale_O, bias_O, residual_RO);
  const Launch launch("quantized_product", {x_RK, weight_OK, scale_O});
  auto y_RO = at::empty({x_RK.size(0), weight_OK.size(0)}, x_RK.options());
  using T = BFloat16Bits;
  const QuantizedProductCuda product{.y = mutable_data<T>(y_RO),
                                     .x = data<T>(x_RK),
                                     .weight = data<int8_t>(weight_OK),
                                     .scale = data<float>(scale_O),
                                     .bias = bias_O ? data<T>(*bias_O) : nullptr,
                                     .residual = residual_RO ? data<T>(*residual_RO) : nullptr,
                                     .rows = x_RK.size(0),
                                     .inputs = x_RK.size(1),
                                     .outputs = weight_OK.size(0)};
  if (product.rows > kFewRows || !fits_quantized_product_cuda(product))
    return product_of_many_rows(x_RK, weight_OK, scale_O, bias_O, residual_RO);
  quantized_product_cuda(product, launch.stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y_RO;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  m.impl("rms_norm_forward", TORCH_FN(bough::rms_norm_forward_op));
  m.impl("rms_norm_backward", TORCH_FN(bough::rms_norm_backward_op));
  m.impl("swiglu_forward", TORCH_FN(bough::swiglu_forward_op));
  m.impl("swiglu_backward", TORCH_FN(bough::swiglu_backward_op));
  m.impl("qk_norm_rotary_forward", TORCH_FN(bough::qk_norm_rotary_forward_op));
  m.impl("qk_norm_rotary_backward", TORCH_FN(bough::qk_norm_rotary_backward_op));
  m.impl("log_prob_forward", TORCH_FN(bough::log_prob_forward_op));
  m.impl("log_prob_backward_", TORCH_FN(bough::log_prob_backward_op));
  m.impl("sum_of_squares", TORCH_FN(bough::sum_of_squares_op));
  m.impl("add_embedding_gradient_", TORCH_FN(bough::add_embedding_gradient_op));
  m.impl("adamw_", TORCH_FN(bough::adamw_op));
  m.impl("quantize_rows_", TORCH_FN(bough::quantize_rows_op));
  m.impl("quantized_product", TORCH_FN(bough::quantized_product_op));
  m.impl("draw_token", TORCH_FN(bough::draw_token_op));
}

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <tuple>

#include "kernels/common/cuda_launch.h"
#include "kernels/log_prob/log_prob.h"
#include "kernels/log_prob/log_prob_cuda.h"
#include "kernels/parameter.h"

namespace bough {

namespace {
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
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  bough::register_cuda_kernel(m, "log_prob_forward", TORCH_FN(bough::log_prob_forward_op));
  bough::register_cuda_kernel(m, "log_prob_backward_", TORCH_FN(bough::log_prob_backward_op));
  bough::register_cuda_kernel(m, "draw_token", TORCH_FN(bough::draw_token_op));
}

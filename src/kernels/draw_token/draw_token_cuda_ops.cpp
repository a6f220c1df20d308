// The CUDA kernel of draw_token as a torch op.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <torch/library.h>

#include "kernels/common/cuda_launch.h"
#include "kernels/common/dispatch.h"
#include "kernels/draw_token/draw_token.h"
#include "kernels/draw_token/draw_token_cuda.h"

namespace bough {

namespace {
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
  m.impl("draw_token", TORCH_FN(bough::draw_token_op));
}

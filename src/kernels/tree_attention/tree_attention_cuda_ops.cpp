// The CUDA kernels of tree attention as torch ops. The reference computes fp64, and heads that are too wide
// for the kernels or for the GPU's shared memory.
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "kernels/common/cuda_launch.h"
#include "kernels/tree_attention/key_spans.h"
#include "kernels/tree_attention/tree_attention.h"
#include "kernels/tree_attention/tree_attention_cuda.h"

namespace bough {

namespace {
// tensors: all that the kernels read and write in packs. The tensor cores need aligned ones.
bool has_kernel(Tensor q_TNH, bool tensor_cores, at::TensorList tensors) {
  const int64_t head_dim = q_TNH.size(2);
  const bool is_aligned = std::all_of(tensors.begin(), tensors.end(), [](Tensor tensor) {
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  });
  tensor_cores = tensor_cores && is_aligned && q_TNH.scalar_type() == at::kBFloat16;
  return q_TNH.scalar_type() != at::kDouble && head_dim <= kTreeAttentionMaxHeadDim &&
         tree_attention_shared_bytes(head_dim, tensor_cores) <=
             static_cast<int64_t>(at::cuda::getDeviceProperties(q_TNH.get_device())->sharedMemPerBlockOptin);
}

// Calls function.template operator()<T>() with T = float or BFloat16Bits.
template <class Function>
void dispatch_kernel_types(at::ScalarType type, Function&& function) {
  BOUGH_CHECK(type == at::kFloat || type == at::kBFloat16,
              "tree_attention computes in fp32, fp64 and bf16, got ", c10::toString(type));
  type == at::kFloat ? function.template operator()<float>() : function.template operator()<BFloat16Bits>();
}

at::Tensor given(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

// Repeats a check here, because Python calls the op directly, without the checks of the C++ function.
void check_spans(const TreeAttentionInput& in) {
  BOUGH_CHECK(in.spans.defined() && in.spans.scalar_type() == at::kInt && in.spans.is_contiguous() &&
                  in.spans.numel() == key_spans_size(in.k_stack_PGH.size(0), in.q_TNH.size(0)),
              "tree_attention: on CUDA it takes the spans of end_local (bough::key_spans)");
}

template <class T>
TreeAttentionCuda<T> kernel_input(const TreeAttentionInput& in, bool tensor_cores) {
  return {.q = data<T>(in.q_TNH),
          .k = data<T>(in.k_TGH),
          .v = data<T>(in.v_TGH),
          .k_stack = data<T>(in.k_stack_PGH),
          .v_stack = data<T>(in.v_stack_PGH),
          .end_local = data<int32_t>(in.end_local),
          .spans = data<int32_t>(in.spans),
          .num_tokens = in.q_TNH.size(0),
          .num_stack = in.k_stack_PGH.size(0),
          .num_heads = in.q_TNH.size(1),
          .num_groups = in.k_TGH.size(1),
          .head_dim = in.q_TNH.size(2),
          .scale = static_cast<float>(in.scale),
          .tensor_cores = tensor_cores};
}

template <bool kTensorCores>
std::tuple<at::Tensor, at::Tensor> forward(Tensor q, Tensor k, Tensor v, Tensor k_stack, Tensor v_stack,
                                           Tensor end_local, const std::optional<at::Tensor>& spans,
                                           double scale) {
  const TreeAttentionInput in{q, k, v, k_stack, v_stack, end_local, scale, given(spans)};
  if (!has_kernel(q, kTensorCores, {q, k, v, k_stack, v_stack})) {
    const auto out = tree_attention_forward_reference(in);
    return {out.o_TNH, out.lse_TN};
  }
  check_spans(in);
  const Launch launch("tree_attention", {q, k, v, k_stack, v_stack, end_local, in.spans});
  auto o = at::empty_like(q);
  auto lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
  dispatch_kernel_types(q.scalar_type(), [&]<class T>() {
    tree_attention_forward_cuda(kernel_input<T>(in, kTensorCores), mutable_data<T>(o),
                                mutable_data<float>(lse), launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {o, lse};
}

template <bool kTensorCores>
std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(Tensor d_o, Tensor q, Tensor k, Tensor v,
                                                        Tensor k_stack, Tensor v_stack, Tensor end_local,
                                                        const std::optional<at::Tensor>& spans, Tensor o,
                                                        Tensor lse, double scale, Tensor d_k_stack,
                                                        Tensor d_v_stack) {
  const TreeAttentionInput in{q, k, v, k_stack, v_stack, end_local, scale, given(spans)};
  if (!has_kernel(q, kTensorCores, {q, k, v, k_stack, v_stack, d_o, d_k_stack, d_v_stack})) {
    const auto d = tree_attention_backward_reference(in, {o, lse}, d_o, d_k_stack, d_v_stack);
    return {d.d_q_TNH, d.d_k_TGH, d.d_v_TGH};
  }
  check_spans(in);
  const Launch launch("tree_attention",
                      {q, k, v, k_stack, v_stack, end_local, in.spans, d_o, o, lse, d_k_stack, d_v_stack});
  const auto options = q.options().dtype(at::kFloat);
  auto d_q = at::empty_like(q);
  auto d_k = at::empty(k.sizes(), options), d_v = at::empty(k.sizes(), options);
  const auto scalars = at::empty({2, q.size(1), q.size(0)}, options);
  dispatch_kernel_types(q.scalar_type(), [&]<class T>() {
    const int64_t num_parts = tree_attention_num_parts<T>(k_stack.size(0), q.size(0), q.size(1), k.size(1));
    at::Tensor parts;
    if (num_parts > 1) parts = at::empty({num_parts * 2 * (k_stack.numel() + k.numel())}, options);
    tree_attention_backward_cuda(
        kernel_input<T>(in, kTensorCores),
        TreeAttentionCudaGradient<T>{.d_o = data<T>(d_o),
                                     .o = data<T>(o),
                                     .lse = data<float>(lse),
                                     .dots = mutable_data<float>(scalars),
                                     .log2_sums = mutable_data<float>(scalars) + scalars.stride(0),
                                     .parts = num_parts > 1 ? mutable_data<float>(parts) : nullptr,
                                     .d_q = mutable_data<T>(d_q),
                                     .d_k = mutable_data<float>(d_k),
                                     .d_v = mutable_data<float>(d_v),
                                     .d_k_stack = mutable_data<float>(d_k_stack),
                                     .d_v_stack = mutable_data<float>(d_v_stack)},
        launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {d_q, d_k, d_v};
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  bough::register_cuda_kernel(m, "tree_attention_forward", TORCH_FN(bough::forward<true>),
                              TORCH_FN(bough::forward<false>));
  bough::register_cuda_kernel(m, "tree_attention_backward", TORCH_FN(bough::backward<true>),
                              TORCH_FN(bough::backward<false>));
}

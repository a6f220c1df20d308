#include <ATen/ATen.h>

#include "kernels/common/dispatch.h"
#include "kernels/common/op.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary_isa.h"

namespace bough {

namespace {
using OptionalTensor = std::optional<at::Tensor>;

std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rotary_forward_cpu(
    const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const OptionalTensor& q_norm,
    const OptionalTensor& k_norm, int64_t num_heads, int64_t num_kv_heads, double eps) {
  const int64_t num_tokens = qkv.size(0);
  const int64_t head_dim = 2 * cos.size(1);
  const bool in_lanes = head_dim == 64 || head_dim == 128;
  const int64_t stride = qkv.size(1);
  auto q = at::empty({num_tokens, num_heads, head_dim}, qkv.options());
  auto k = at::empty({num_tokens, num_kv_heads, head_dim}, qkv.options());
  auto v = at::empty({num_tokens, num_kv_heads, head_dim}, qkv.options());
  dispatch_float_types(qkv.scalar_type(), "qk_norm_rotary", [&]<class T>() {
    using A = AccOf<T>;
    T *q_data = mutable_data<T>(q), *k_data = mutable_data<T>(k), *v_data = mutable_data<T>(v);
    at::parallel_for(0, num_tokens, grain(stride), [&](int64_t begin, int64_t end) {
      const T* rows = data<T>(qkv) + begin * stride;
      const A* c = data<A>(cos) + begin * head_dim / 2;
      const A* s = data<A>(sin) + begin * head_dim / 2;
      BOUGH_BF16_OR_ISA_CALL(T, in_lanes, norm_rotate_rows, q_data + begin * num_heads * head_dim, rows, c, s,
                             q_norm ? data<T>(*q_norm) : nullptr, eps,
                             HeadRows{end - begin, num_heads, head_dim, stride});
      BOUGH_BF16_OR_ISA_CALL(T, in_lanes, norm_rotate_rows, k_data + begin * num_kv_heads * head_dim,
                             rows + num_heads * head_dim, c, s, k_norm ? data<T>(*k_norm) : nullptr, eps,
                             HeadRows{end - begin, num_kv_heads, head_dim, stride});
      const int64_t v_width = num_kv_heads * head_dim;
      for (int64_t t = 0; t < end - begin; ++t)
        std::memcpy(v_data + (begin + t) * v_width, rows + t * stride + (num_heads + num_kv_heads) * head_dim,
                    v_width * sizeof(T));
    });
  });
  return {q, k, v};
}

at::Tensor qk_norm_rotary_backward_cpu(const at::Tensor& d_q, const at::Tensor& d_k, const at::Tensor& d_v,
                                       const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                                       const OptionalTensor& q_norm, const OptionalTensor& k_norm,
                                       const OptionalTensor& d_q_norm, const OptionalTensor& d_k_norm,
                                       double eps) {
  const int64_t num_tokens = qkv.size(0);
  const int64_t head_dim = 2 * cos.size(1);
  const bool in_lanes = head_dim == 64 || head_dim == 128;
  const int64_t stride = qkv.size(1);
  const int64_t num_heads = d_q.size(1);
  const int64_t num_kv_heads = d_k.size(1);
  auto d_qkv = at::empty_like(qkv);
  const int64_t num_parts = std::clamp<int64_t>(num_tokens / grain(stride), 1, at::get_num_threads());
  auto partial =
      at::zeros({num_parts, 3, head_dim}, cos.options());  // d_q_norm, d_k_norm, scratch of each part
  dispatch_float_types(qkv.scalar_type(), "qk_norm_rotary", [&]<class T>() {
    using A = AccOf<T>;
    T* d_qkv_data = mutable_data<T>(d_qkv);
    A* partial_data = mutable_data<A>(partial);
    at::parallel_for(0, num_parts, 1, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part) {
        const int64_t begin = num_tokens * part / num_parts;
        const int64_t end = num_tokens * (part + 1) / num_parts;
        A* sums = partial_data + part * 3 * head_dim;
        const T* rows = data<T>(qkv) + begin * stride;
        T* d_rows = d_qkv_data + begin * stride;
        const A* c = data<A>(cos) + begin * head_dim / 2;
        const A* s = data<A>(sin) + begin * head_dim / 2;
        const int64_t k_offset = num_heads * head_dim;
        const int64_t v_offset = (num_heads + num_kv_heads) * head_dim;
        BOUGH_BF16_OR_ISA_CALL(T, in_lanes, norm_rotate_backward_rows, d_rows, sums, sums + 2 * head_dim,
                               data<T>(d_q) + begin * k_offset, rows, c, s,
                               q_norm ? data<T>(*q_norm) : nullptr, eps,
                               HeadRows{end - begin, num_heads, head_dim, stride});
        BOUGH_BF16_OR_ISA_CALL(T, in_lanes, norm_rotate_backward_rows, d_rows + k_offset, sums + head_dim,
                               sums + 2 * head_dim, data<T>(d_k) + begin * num_kv_heads * head_dim,
                               rows + k_offset, c, s, k_norm ? data<T>(*k_norm) : nullptr, eps,
                               HeadRows{end - begin, num_kv_heads, head_dim, stride});
        const int64_t v_width = num_kv_heads * head_dim;
        for (int64_t t = begin; t < end; ++t)
          std::memcpy(d_qkv_data + t * stride + v_offset, data<T>(d_v) + t * v_width, v_width * sizeof(T));
      }
    });
  });
  if (d_q_norm) {
    const auto sums = partial.sum(0);
    d_q_norm->add_(sums[0]);
    d_k_norm->add_(sums[1]);
  }
  return d_qkv;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("qk_norm_rotary_forward", TORCH_FN(bough::qk_norm_rotary_forward_cpu));
  m.impl("qk_norm_rotary_backward", TORCH_FN(bough::qk_norm_rotary_backward_cpu));
}

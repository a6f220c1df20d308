#include <ATen/ATen.h>

#include "kernels/common/op.h"
#include "kernels/common/scratch.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary_loops.h"

namespace bough {

namespace {
using OptionalTensor = std::optional<at::Tensor>;

// Prefetches elements. Backward calls it for v, which it does not read otherwise: the CPU's own prefetcher
// works only if rows are read without gaps.
template <class T>
void bring_near(const T* elements, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(elements + i);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rotary_forward_cpu(
    const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const OptionalTensor& q_norm,
    const OptionalTensor& k_norm, int64_t num_heads, int64_t num_kv_heads, double eps, double weight_offset) {
  const NormSettings norm{eps, weight_offset};
  const int64_t num_tokens = qkv.size(0), num_pairs = cos.size(1);
  const int64_t head_dim = qkv.size(1) / (num_heads + 2 * num_kv_heads);
  const bool in_lanes = (head_dim == 64 || head_dim == 128) && head_dim == 2 * num_pairs;
  const int64_t stride = qkv.size(1), q_width = num_heads * head_dim, k_width = num_kv_heads * head_dim;
  auto q = at::empty({num_tokens, num_heads, head_dim}, qkv.options());
  auto k = at::empty({num_tokens, num_kv_heads, head_dim}, qkv.options());
  auto v = at::empty({num_tokens, num_kv_heads, head_dim}, qkv.options());
  dispatch_float_types(qkv.scalar_type(), "qk_norm_rotary", [&]<class T>() {
    using A = AccOf<T>;
    T *q_data = mutable_data<T>(q), *k_data = mutable_data<T>(k), *v_data = mutable_data<T>(v);
    // A thread processes q, k and v of a token one after the other, so that the token's row is read from
    // memory once, in order.
    at::parallel_for(0, num_tokens, grain(stride), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* row = data<T>(qkv) + t * stride;
        const A* c = data<A>(cos) + t * num_pairs;
        const A* s = data<A>(sin) + t * num_pairs;
        BOUGH_BF16_OR_ISA_CALL(T, in_lanes, norm_rotate_rows, q_data + t * q_width, row, c, s,
                               q_norm ? data<T>(*q_norm) : nullptr, norm,
                               HeadRows{num_heads, head_dim, num_pairs});
        BOUGH_BF16_OR_ISA_CALL(T, in_lanes, norm_rotate_rows, k_data + t * k_width, row + q_width, c, s,
                               k_norm ? data<T>(*k_norm) : nullptr, norm,
                               HeadRows{num_kv_heads, head_dim, num_pairs});
        std::memcpy(v_data + t * k_width, row + q_width + k_width, k_width * sizeof(T));
      }
    });
  });
  return {q, k, v};
}

at::Tensor qk_norm_rotary_backward_cpu(const at::Tensor& d_q, const at::Tensor& d_k, const at::Tensor& d_v,
                                       const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                                       const OptionalTensor& q_norm, const OptionalTensor& k_norm,
                                       const OptionalTensor& d_q_norm, const OptionalTensor& d_k_norm,
                                       double eps, double weight_offset) {
  const NormSettings norm{eps, weight_offset};
  const int64_t num_tokens = qkv.size(0), num_pairs = cos.size(1);
  const int64_t head_dim = d_q.size(2);
  const bool in_lanes = (head_dim == 64 || head_dim == 128) && head_dim == 2 * num_pairs;
  const int64_t stride = qkv.size(1);
  const int64_t num_heads = d_q.size(1);
  const int64_t num_kv_heads = d_k.size(1);
  const int64_t q_width = num_heads * head_dim, k_width = num_kv_heads * head_dim;
  auto d_qkv = at::empty_like(qkv);
  dispatch_float_types(qkv.scalar_type(), "qk_norm_rotary", [&]<class T>() {
    using A = AccOf<T>;
    T* d_qkv_data = mutable_data<T>(d_qkv);
    const PartialSums<A> all_sums(num_tokens, grain(stride), 3 * head_dim);  // d_q_norm, d_k_norm, scratch
    all_sums.for_parts([&](int64_t begin, int64_t end, A* sums) {
      for (int64_t t = begin; t < end; ++t) {
        const T* row = data<T>(qkv) + t * stride;
        T* d_row = d_qkv_data + t * stride;
        const A* c = data<A>(cos) + t * num_pairs;
        const A* s = data<A>(sin) + t * num_pairs;
        BOUGH_BF16_OR_ISA_CALL(T, in_lanes, norm_rotate_backward_rows, d_row, sums, sums + 2 * head_dim,
                               data<T>(d_q) + t * q_width, row, c, s, q_norm ? data<T>(*q_norm) : nullptr,
                               norm, HeadRows{num_heads, head_dim, num_pairs});
        BOUGH_BF16_OR_ISA_CALL(T, in_lanes, norm_rotate_backward_rows, d_row + q_width, sums + head_dim,
                               sums + 2 * head_dim, data<T>(d_k) + t * k_width, row + q_width, c, s,
                               k_norm ? data<T>(*k_norm) : nullptr, norm,
                               HeadRows{num_kv_heads, head_dim, num_pairs});
        bring_near(row + q_width + k_width, k_width);
        std::memcpy(d_row + q_width + k_width, data<T>(d_v) + t * k_width, k_width * sizeof(T));
      }
    });
    if (!d_q_norm) return;
    all_sums.add_to(mutable_data<A>(*d_q_norm), 0, head_dim);
    all_sums.add_to(mutable_data<A>(*d_k_norm), head_dim, head_dim);
  });
  return d_qkv;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("qk_norm_rotary_forward", TORCH_FN(bough::qk_norm_rotary_forward_cpu));
  m.impl("qk_norm_rotary_backward", TORCH_FN(bough::qk_norm_rotary_backward_cpu));
}

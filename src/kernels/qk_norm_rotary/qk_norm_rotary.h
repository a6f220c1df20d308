// The steps between the fused qkv projection and attention:
//   - split into q, k and v
//   - RMSNorm of each head of q and k, optional (Qwen3)
//   - rotary embedding of the first 2r elements of each head of q and k (Su et al. 2021; layout in halves, as
//     in transformers). 2r is H in most models, less in Phi-4-mini, 0 in SmolLM3's layers without positions.
//
//   x̂ = x · rstd(x) · (w + offset)      per head; x̂ = x without norm
//   y[0:r]   = x̂[0:r] · cos - x̂[r:2r] · sin
//   y[r:2r]  = x̂[r:2r] · cos + x̂[0:r] · sin
//   y[2r:H]  = x̂[2r:H]
//
// All arithmetic is in the accumulator type. Backward applies the inverse rotation, then the norm's
// backward (rms_norm.h). It overwrites d_qkv and accumulates the norms' main_grad.
#pragma once

#include <tuple>

#include "kernels/common/element_types.h"
#include "kernels/parameter.h"

namespace bough {

struct QkvLayout {
  int64_t num_heads;     // N
  int64_t num_kv_heads;  // G
  int64_t head_dim;      // H, even
  int64_t width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

// cos and sin of position · frequency, each [T, r] in the accumulator type. Angles are computed in fp32 as in
// transformers, and in fp64 for fp64 models.
struct RotaryTable {
  at::Tensor cos, sin;
};
// Returns theta^(-2i/width), [width / 2]. options: the accumulator type and the device.
at::Tensor rotary_frequencies(int64_t width, double theta, const at::TensorOptions& options);
// Computes the table for positions_T. cos and sin are multiplied by `scale`.
RotaryTable make_rotary_table(const at::Tensor& positions_T, const at::Tensor& frequencies, double scale = 1);
RotaryTable make_rotary_table(const at::Tensor& positions_T, int64_t head_dim, double theta,
                              at::ScalarType acc);

// qkv: [T, (N + 2G) · H] contiguous, with q's heads first, then k's, then v's. q_norm, k_norm: [H], or both
// nullptr. Returns contiguous q_TNH, k_TGH, v_TGH. Differentiable.
std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rotary(const at::Tensor& qkv, const QkvLayout& layout,
                                                              const RotaryTable& rotary,
                                                              const Parameter* q_norm,
                                                              const Parameter* k_norm,
                                                              const NormSettings& norm);

// References of forward and backward in tensor ops, for any device. The norms are nullopt if the model has
// none.
std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rotary_forward_reference(
    const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
    const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm, int64_t num_heads,
    int64_t num_kv_heads, const NormSettings& norm);
at::Tensor qk_norm_rotary_backward_reference(
    const at::Tensor& d_q, const at::Tensor& d_k, const at::Tensor& d_v, const at::Tensor& qkv,
    const at::Tensor& cos, const at::Tensor& sin, const std::optional<at::Tensor>& q_norm,
    const std::optional<at::Tensor>& k_norm, const std::optional<at::Tensor>& d_q_norm,
    const std::optional<at::Tensor>& d_k_norm, const NormSettings& norm);

}  // namespace bough

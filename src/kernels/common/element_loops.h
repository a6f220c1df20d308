// Loops over elements and rows for the CPU's ops. The compiler vectorizes element_loops_isa.cpp once for each
// instruction set. element_loops_bf16.cpp and log_prob_avx512.cpp have faster loops with intrinsics. No
// torch here (see isa.h). T is float, BFloat16Bits or double; A is its accumulator type.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"
#include "kernels/common/isa.h"

// rms_norm.h
// RMSNorm of rows of `width` elements. Backward accumulates d_weight[width]. In backward, y and residual may
// be nullptr, and y may be d_y.
BOUGH_ISA_DECLARE(template <class T, class A> void rms_norm_rows(T* y, A* rstd, const T* x, const T* weight,
                                                                 int64_t num_rows, int64_t width,
                                                                 const NormSettings& norm))
BOUGH_ISA_DECLARE(template <class T, class A>
                  void rms_norm_backward_rows(T* d_x, T* y, A* d_weight, const T* d_y, const T* x,
                                              const T* weight, const T* residual, const A* rstd,
                                              int64_t num_rows, int64_t width, double weight_offset))

namespace bough::bf16 {
// RMSNorm of rows if has_avx512_bf16() and width is a multiple of 32. This is twice as fast, because loads
// and stores are most of the work.
void rms_norm_rows(BFloat16Bits* y, float* rstd, const BFloat16Bits* x, const BFloat16Bits* weight,
                   int64_t num_rows, int64_t width, const NormSettings& norm);
void rms_norm_backward_rows(BFloat16Bits* d_x, BFloat16Bits* y, float* d_weight, const BFloat16Bits* d_y,
                            const BFloat16Bits* x, const BFloat16Bits* weight, const BFloat16Bits* residual,
                            const float* rstd, int64_t num_rows, int64_t width, double weight_offset);
}  // namespace bough::bf16

// swiglu.h

BOUGH_ISA_DECLARE(template <class T> void swiglu_rows(T* y, const T* gate_up, int64_t num_rows, int64_t width,
                                                      GateActivation activation))
// In backward y may be d_y, and d_gate_up may be gate_up.
BOUGH_ISA_DECLARE(template <class T> void swiglu_backward_rows(T* d_gate_up, T* y, const T* d_y,
                                                               const T* gate_up, int64_t num_rows,
                                                               int64_t width, GateActivation activation))

namespace bough::bf16 {
// Gated activations of rows if has_avx512_bf16() and width is a multiple of 32.
void swiglu_rows(BFloat16Bits* y, const BFloat16Bits* gate_up, int64_t num_rows, int64_t width,
                 GateActivation activation);
void swiglu_backward_rows(BFloat16Bits* d_gate_up, BFloat16Bits* y, const BFloat16Bits* d_y,
                          const BFloat16Bits* gate_up, int64_t num_rows, int64_t width,
                          GateActivation activation);
}  // namespace bough::bf16

// qk_norm_rotary.h

namespace bough {
struct HeadRows {  // the adjacent heads of one token
  int64_t num_heads;
  int64_t head_dim;
  int64_t num_pairs;  // pairs of elements i and num_pairs + i that are rotated; at most head_dim / 2
};
}  // namespace bough

// Computes y[heads, H] from qkv. weight: [H], or nullptr for no norm. cos, sin: [num_pairs].
BOUGH_ISA_DECLARE(template <class T, class A>
                  void norm_rotate_rows(T* y, const T* qkv, const A* cos, const A* sin, const T* weight,
                                        const NormSettings& norm, const HeadRows& rows))
// Overwrites d_qkv and accumulates d_weight[H]. scratch: [H].
BOUGH_ISA_DECLARE(template <class T, class A>
                  void norm_rotate_backward_rows(T* d_qkv, A* d_weight, A* scratch, const T* d_y,
                                                 const T* qkv, const A* cos, const A* sin, const T* weight,
                                                 const NormSettings& norm, const HeadRows& rows))

namespace bough::bf16 {
// Norm and rotation if has_avx512_bf16() and head_dim = 2 · num_pairs is 64 or 128.
void norm_rotate_rows(BFloat16Bits* y, const BFloat16Bits* qkv, const float* cos, const float* sin,
                      const BFloat16Bits* weight, const NormSettings& norm, const HeadRows& rows);
void norm_rotate_backward_rows(BFloat16Bits* d_qkv, float* d_weight, float* scratch, const BFloat16Bits* d_y,
                               const BFloat16Bits* qkv, const float* cos, const float* sin,
                               const BFloat16Bits* weight, const NormSettings& norm, const HeadRows& rows);
}  // namespace bough::bf16

// log_prob.h
// Replaces logits by d_logits, without the term of the label.
BOUGH_ISA_DECLARE(template <class T, class A>
                  void log_prob_backward_row(T* logits, int64_t width, A inverse_temperature, A lse,
                                             A entropy, A d_log_prob, A d_entropy))

// embedding.h
// sums[tokens[t]][column] += rows[t][column], for columns [begin, end) of `width`, in ascending t.
BOUGH_ISA_DECLARE(template <class T, class A>
                  void add_rows_of_tokens(A* sums, const int64_t* tokens, const T* rows, int64_t num_rows,
                                          int64_t width, int64_t begin, int64_t end))

// adamw.h

namespace bough {
// The scalars of one update, computed in fp64 and rounded to the accumulator type.
template <class A>
struct AdamwScalars {
  A gradient_scale;
  A beta1, one_minus_beta1;
  A beta2, one_minus_beta2;
  A decay;             // 1 - lr · weight_decay
  A step_size;         // lr / (1 - beta1^step)
  A inverse_variance;  // 1 / (1 - beta2^step)
  A eps;
};
}  // namespace bough

// Updates `size` elements. master is nullptr if T is A.
BOUGH_ISA_DECLARE(template <class T, class A> void adamw_elements(T* value, A* master, A* exp_avg,
                                                                  A* exp_avg_sq, A* gradient, int64_t size,
                                                                  const AdamwScalars<A>& scalars))
BOUGH_ISA_DECLARE(template <class T> void sum_of_squares_block(double* sum, const T* x, int64_t size))

// Rows of fp32 or bf16 logits with AVX-512, two vectors at a time. softmax_blocks.h and log_prob_backward_row
// document the functions.
namespace bough::avx512 {

template <class T>
void softmax_maxima(const T* logits, int64_t width, float* maxima);
template <class T>
void softmax_sums(const T* logits, int64_t width, float maximum, float inverse_temperature, double* sums,
                  double* dots);
template <class T>
void softmax_weights(const T* logits, int64_t count, float maximum, float inverse_temperature,
                     float* weights);
template <class T>
void log_prob_backward(T* logits, int64_t width, float inverse_temperature, float lse, float entropy,
                       float d_log_prob, float d_entropy);

}  // namespace bough::avx512

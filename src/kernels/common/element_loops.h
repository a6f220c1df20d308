// Loops over elements and rows that ops on the CPU are made of. The compiler vectorises
// element_loops_isa.cpp, once for each instruction set; element_loops_bf16.cpp and log_prob_avx512.cpp are
// written with intrinsics where that is faster. No torch here (see isa.h). T is float, BFloat16Bits or
// double, A its accumulator type.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"
#include "kernels/common/isa.h"

// rms_norm.h
// RMSNorm of rows of `width` elements. A is the accumulator type; d_weight[width] is added to; y (which may
// be d_y) and residual may be null.
BOUGH_ISA_DECLARE(template <class T, class A> void rms_norm_rows(T* y, A* rstd, const T* x, const T* weight,
                                                                 int64_t num_rows, int64_t width,
                                                                 const NormSettings& norm))
BOUGH_ISA_DECLARE(template <class T, class A>
                  void rms_norm_backward_rows(T* d_x, T* y, A* d_weight, const T* d_y, const T* x,
                                              const T* weight, const T* residual, const A* rstd,
                                              int64_t num_rows, int64_t width, double weight_offset))

namespace bough::bf16 {
// RMSNorm of rows where has_avx512_bf16(), width a multiple of 32: twice as fast, since loads and stores are
// most of the work.
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
// SwiGLU of rows where has_avx512_bf16(), width a multiple of 32.
void swiglu_rows(BFloat16Bits* y, const BFloat16Bits* gate_up, int64_t num_rows, int64_t width,
                 GateActivation activation);
void swiglu_backward_rows(BFloat16Bits* d_gate_up, BFloat16Bits* y, const BFloat16Bits* d_y,
                          const BFloat16Bits* gate_up, int64_t num_rows, int64_t width,
                          GateActivation activation);
}  // namespace bough::bf16

// qk_norm_rotary.h

namespace bough {
struct HeadRows {  // of one token, beside each other
  int64_t num_heads;
  int64_t head_dim;
  int64_t num_pairs;  // that are turned, at most head_dim / 2: elements i and num_pairs + i
};
}  // namespace bough

// Makes y[heads, H] from qkv; weight null: no norm. cos, sin: [num_pairs].
BOUGH_ISA_DECLARE(template <class T, class A>
                  void norm_rotate_rows(T* y, const T* qkv, const A* cos, const A* sin, const T* weight,
                                        const NormSettings& norm, const HeadRows& rows))
// d_qkv is overwritten; d_weight[H] is added to; scratch[H].
BOUGH_ISA_DECLARE(template <class T, class A>
                  void norm_rotate_backward_rows(T* d_qkv, A* d_weight, A* scratch, const T* d_y,
                                                 const T* qkv, const A* cos, const A* sin, const T* weight,
                                                 const NormSettings& norm, const HeadRows& rows))

namespace bough::bf16 {
// Norm and rotation where has_avx512_bf16(), heads of 64 or 128 that are turned whole.
void norm_rotate_rows(BFloat16Bits* y, const BFloat16Bits* qkv, const float* cos, const float* sin,
                      const BFloat16Bits* weight, const NormSettings& norm, const HeadRows& rows);
void norm_rotate_backward_rows(BFloat16Bits* d_qkv, float* d_weight, float* scratch, const BFloat16Bits* d_y,
                               const BFloat16Bits* qkv, const float* cos, const float* sin,
                               const BFloat16Bits* weight, const NormSettings& norm, const HeadRows& rows);
}  // namespace bough::bf16

// log_prob.h
// Turns logits into d_logits but for the label's own term.
BOUGH_ISA_DECLARE(template <class T, class A>
                  void log_prob_backward_row(T* logits, int64_t width, A inverse_temperature, A lse,
                                             A entropy, A d_log_prob, A d_entropy))

// embedding.h
// Adds rows to sums: sums[tokens[t]][columns] += rows[t][columns], columns [begin, end) of `width`, t
// ascending.
BOUGH_ISA_DECLARE(template <class T, class A>
                  void add_rows_of_tokens(A* sums, const int64_t* tokens, const T* rows, int64_t num_rows,
                                          int64_t width, int64_t begin, int64_t end))

// adamw.h

namespace bough {
// The numbers of one update, the same for all elements; computed in fp64, rounded to the accumulator type.
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

// Updates `size` elements. master == nullptr: value is of type A and its own master.
BOUGH_ISA_DECLARE(template <class T, class A> void adamw_elements(T* value, A* master, A* exp_avg,
                                                                  A* exp_avg_sq, A* gradient, int64_t size,
                                                                  const AdamwScalars<A>& scalars))
BOUGH_ISA_DECLARE(template <class T> void sum_of_squares_block(double* sum, const T* x, int64_t size))

// Rows of logits in fp32 and bf16 by AVX-512: what softmax_blocks.h and log_prob_backward_row say, two
// vectors at a time.
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

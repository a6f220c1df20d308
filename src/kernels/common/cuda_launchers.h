// Launchers of the CUDA kernels of element-wise and similar ops. x_cuda.cu defines the launchers of x, x.h
// says what they compute, and cuda_ops.cpp binds them to the dispatcher. Pointers are device pointers.
// Callers get launch errors from cudaGetLastError. T is the element type and A the accumulator type: (float,
// float), (BFloat16Bits, float) or (double, double).
#pragma once

#include <cstdint>

#include "kernels/common/element_loops.h"
#include "kernels/common/element_types.h"

namespace bough {

// rms_norm

template <class T, class A>
void rms_norm_forward_cuda(T* y, A* rstd, const T* x, const T* weight, int64_t num_rows, int64_t width,
                           const NormSettings& norm, CudaStream stream);

template <class T, class A>
struct RmsNormBackward {
  T* d_x;       // overwritten
  T* y;         // the forward's y, overwritten; may be d_y or nullptr
  A* d_weight;  // [width], accumulated
  A* partial;   // scratch [rms_norm_num_parts(num_rows), width]
  const T* d_y;
  const T* x;
  const T* weight;
  const T* residual;  // added to d_x; or nullptr
  const A* rstd;
  int64_t num_rows;
  int64_t width;
  A weight_offset;
};

// Number of parts of a sum over rows. It depends only on the number of rows, so that the order of the sum is
// the same on every device.
int64_t rms_norm_num_parts(int64_t num_rows);

template <class T, class A>
void rms_norm_backward_cuda(const RmsNormBackward<T, A>& arguments, CudaStream stream);

// swiglu
// gate_up, d_gate_up: [num_rows, 2 · width]; y, d_y: [num_rows, width]. In backward y may be d_y, and
// d_gate_up may be gate_up.

template <class T>
void swiglu_forward_cuda(T* y, const T* gate_up, int64_t num_rows, int64_t width, GateActivation activation,
                         CudaStream stream);

template <class T>
void swiglu_backward_cuda(T* d_gate_up, T* y, const T* d_y, const T* gate_up, int64_t num_rows, int64_t width,
                          GateActivation activation, CudaStream stream);

// qk_norm_rotary

template <class T, class A>
struct QkNormRotaryInput {
  const T* qkv;              // [num_tokens, (N + 2G) · head_dim]
  const A *cos, *sin;        // [num_tokens, num_pairs]
  const T *q_norm, *k_norm;  // [head_dim], or both nullptr
  int64_t num_tokens;
  int64_t num_heads;     // N
  int64_t num_kv_heads;  // G
  int64_t head_dim;
  int64_t num_pairs;  // pairs of elements that are rotated, at most head_dim / 2
  A eps;
  A weight_offset;
};

template <class T, class A>
void qk_norm_rotary_forward_cuda(const QkNormRotaryInput<T, A>& input, T* q, T* k, T* v, CudaStream stream);

template <class T, class A>
struct QkNormRotaryGradient {
  const T *d_q, *d_k, *d_v;
  T* d_qkv;                // overwritten
  A *d_q_norm, *d_k_norm;  // [head_dim], accumulated; nullptr without norms
  A* partial;              // scratch [qk_norm_rotary_num_parts(...), 2, head_dim]; nullptr without norms
};

// Number of parts of sums over heads. It depends only on the sizes, so that the order of the sums is the
// same on every device.
int64_t qk_norm_rotary_num_parts(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads);

// The largest head_dim whose sums fit the shared memory of a block: 6144 in fp32, 3072 in fp64.
int64_t qk_norm_rotary_max_head_dim(int64_t accumulator_bytes);

template <class T, class A>
void qk_norm_rotary_backward_cuda(const QkNormRotaryInput<T, A>& input,
                                  const QkNormRotaryGradient<T, A>& gradient, CudaStream stream);

// log_prob

template <class T, class A>
struct LogProbForward {
  A *log_probs, *lse, *entropies;  // [num_rows], overwritten
  const T* logits;                 // [num_rows, width]
  const int64_t* labels;           // [num_rows]
  int64_t num_rows;
  int64_t width;
  double temperature;
};

template <class T, class A>
struct LogProbBackward {
  T* logits;              // [num_rows, width], overwritten with their gradient
  const int64_t* labels;  // [num_rows], as the arrays below
  const A *lse, *entropies, *d_log_probs, *d_entropies;
  int64_t num_rows;
  int64_t width;
  double temperature;
};

template <class T, class A>
void log_prob_forward_cuda(const LogProbForward<T, A>& arguments, CudaStream stream);

template <class T, class A>
void log_prob_backward_cuda(const LogProbBackward<T, A>& arguments, CudaStream stream);

// draw_token

template <class T>
struct DrawTokenCuda {
  double* drawn;           // [num_draws, 5]
  const T* logits;         // [rows, width]
  const double* requests;  // [num_draws, 4]
  int64_t num_draws, width;
};

template <class T>
void draw_token_cuda(const DrawTokenCuda<T>& in, CudaStream stream);

// embedding

template <class T, class A>
struct EmbeddingGradient {
  A* sums;                // [V, width], accumulated
  const int64_t* tokens;  // [num_rows], ascending
  const int64_t* order;   // [num_rows]: tokens[i] is the token of row order[i]; ascending for equal tokens
  const T* rows;          // [num_rows, width]
  int64_t num_rows, width;
};

template <class T, class A>
void add_embedding_gradient_cuda(const EmbeddingGradient<T, A>& gradient, CudaStream stream);

// adamw

template <class T, class A>
struct AdamwArrays {
  T* value;
  A* master;  // nullptr if T is A
  A* exp_avg;
  A* exp_avg_sq;
  A* gradient;  // zeroed
  int64_t size;
};

template <class T, class A>
void adamw_cuda(const AdamwArrays<T, A>& arrays, const AdamwScalars<A>& scalars, CudaStream stream);

// sum_of_squares

int64_t sum_of_squares_num_parts(int64_t size);

// Overwrites *result with the sum over x[size]. partial: scratch [sum_of_squares_num_parts(size)].
template <class T>
void sum_of_squares_cuda(double* result, double* partial, const T* x, int64_t size, CudaStream stream);

// quantized_product

// T: float, BFloat16Bits or double.
template <class T>
void quantize_rows_cuda(int8_t* quantized, float* scale, const T* weight, int64_t rows, int64_t width,
                        CudaStream stream);

struct QuantizedProductCuda {
  BFloat16Bits* y;
  const BFloat16Bits* x;
  const int8_t* weight;
  const float* scale;
  const BFloat16Bits* bias;      // or nullptr
  const BFloat16Bits* residual;  // or nullptr
  int64_t rows, inputs, outputs;
};

// Whether quantized_product_cuda supports the product: addresses and row lengths must be multiples of 16
// bytes.
bool fits_quantized_product_cuda(const QuantizedProductCuda& product);
// Computes products of up to a few hundred rows. Every 64 rows read the weight once. Larger products would
// not use the tensor cores fully.
void quantized_product_cuda(const QuantizedProductCuda& product, CudaStream stream);

}  // namespace bough

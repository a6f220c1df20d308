// Launchers of the CUDA kernels of log_prob.h (cuda_launch.h).
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

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

template <class T>
struct DrawTokenCuda {
  double* drawn;           // [num_draws, 5]
  const T* logits;         // [rows, width]
  const double* requests;  // [num_draws, 4]
  int64_t num_draws, width;
};

template <class T>
void draw_token_cuda(const DrawTokenCuda<T>& in, CudaStream stream);

}  // namespace bough

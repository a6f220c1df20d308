// CUDA launchers of log_prob.h. Pointers are of the device; launch errors are left to cudaGetLastError.
// T, A: float, float; BFloat16Bits, float; double, double.
#pragma once

#include <cstdint>

#include "kernels/common/cuda_stream.h"

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
  T* logits;              // [num_rows, width], become their gradient
  const int64_t* labels;  // [num_rows]; so are the rest
  const A *lse, *entropies, *d_log_probs, *d_entropies;
  int64_t num_rows;
  int64_t width;
  double temperature;
};

template <class T, class A>
void log_prob_forward_cuda(const LogProbForward<T, A>& arguments, CudaStream stream);

template <class T, class A>
void log_prob_backward_cuda(const LogProbBackward<T, A>& arguments, CudaStream stream);

}  // namespace bough

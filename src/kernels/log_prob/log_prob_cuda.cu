// Forward: each CUDA thread block computes one row of logits and reads it once. Every thread keeps softmax
// sums of its elements relative to the largest of them. Sums with different maxima are then merged (Milakov
// and Gimelshein 2018, here also for the entropy's sum). Backward: elementwise.
#include "kernels/common/cuda_kernel.cuh"
#include "kernels/log_prob/log_prob_cuda.h"

namespace bough {

namespace {
constexpr int kForwardThreads = 512;
constexpr int kBackwardThreads = 256;

template <class A>
struct SoftmaxSums {
  A max;  // of the logits
  A sum;  // sum of e = exp(z), z = (logit - max) / temperature; 0: no element seen
  A dot;  // of e · z
};

// Merges the sums of two parts of a row. The sums of the part with the smaller maximum are rescaled by s =
// exp(δ), δ = (smaller - larger) / temperature. `sum` becomes s · sum. All z shift by δ, so `dot` becomes s ·
// (dot + δ · sum).
template <class A>
__device__ SoftmaxSums<A> merge(SoftmaxSums<A> a, SoftmaxSums<A> b, A inverse_temperature) {
  if (a.sum == 0) return b;
  if (b.sum == 0) return a;
  if (a.max < b.max) {
    const SoftmaxSums<A> larger = b;
    b = a;
    a = larger;
  }
  const A shift = (b.max - a.max) * inverse_temperature;
  const A scale = exp(shift);
  return {a.max, a.sum + scale * b.sum, a.dot + scale * (b.dot + shift * b.sum)};
}

template <class A>
__device__ SoftmaxSums<A> warp_merge(SoftmaxSums<A> sums, A inverse_temperature) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const SoftmaxSums<A> other = {__shfl_down_sync(0xFFFFFFFFu, sums.max, offset),
                                  __shfl_down_sync(0xFFFFFFFFu, sums.sum, offset),
                                  __shfl_down_sync(0xFFFFFFFFu, sums.dot, offset)};
    sums = merge(sums, other, inverse_temperature);
  }
  return sums;  // only lane 0 has the sums of the whole warp
}

template <class T, class A, int kPack>
__device__ SoftmaxSums<A> thread_sums(const T* row, int64_t width, A inverse_temperature) {
  SoftmaxSums<A> sums = {0, 0, 0};
  for (int64_t v = threadIdx.x * kPack; v < width; v += blockDim.x * kPack) {
    A x[kPack];
    load(x, row + v);
    SoftmaxSums<A> pack = {x[0], 0, 0};
#pragma unroll
    for (int j = 1; j < kPack; ++j) pack.max = x[j] > pack.max ? x[j] : pack.max;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const A z = (x[j] - pack.max) * inverse_temperature;
      const A e = exp(z);
      pack.sum += e;
      pack.dot += e * z;
    }
    sums = merge(sums, pack, inverse_temperature);
  }
  return sums;
}

template <class T, class A, int kPack>
__global__ void forward_kernel(LogProbForward<T, A> in, A inverse_temperature) {
  __shared__ SoftmaxSums<A> scratch[kMaxWarps];
  for (int64_t r = blockIdx.x; r < in.num_rows; r += gridDim.x) {
    const T* row = in.logits + r * in.width;
    auto sums = warp_merge(thread_sums<T, A, kPack>(row, in.width, inverse_temperature), inverse_temperature);
    __syncthreads();  // all threads have read the previous row's scratch
    if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = sums;
    __syncthreads();
    if (threadIdx.x != 0) continue;
    for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp)
      sums = merge(sums, scratch[warp], inverse_temperature);
    const A max = sums.max * inverse_temperature;
    const A log_sum = log(sums.sum);
    in.lse[r] = max + log_sum;
    // z[label] - max is computed before log_sum is subtracted, so that there is no cancellation if the row
    // has one dominant token.
    const int64_t label = in.labels[r];
    in.log_probs[r] = label < 0 ? -A(INFINITY) : (widen(row[label]) * inverse_temperature - max) - log_sum;
    in.entropies[r] = log_sum - sums.dot / sums.sum;
  }
}

template <class T, class A, int kPack>
__global__ void backward_kernel(LogProbBackward<T, A> in, A inverse_temperature) {
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack;
  if (first >= in.width) return;
  for (int64_t r = blockIdx.y; r < in.num_rows; r += gridDim.y) {
    T* row = in.logits + r * in.width;
    const A lse = in.lse[r];
    const A entropy = in.entropies[r];
    const A d_log_prob = in.d_log_probs[r];
    const A d_entropy = in.d_entropies[r];
    const int64_t label = in.labels[r] - first;  // position within the pack, if in [0, kPack)
    A x[kPack];
    load(x, row + first);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const A log_p = x[j] * inverse_temperature - lse;
      const A p = exp(log_p);
      // At the label, 1 - p is computed as -expm1(log p), without cancellation.
      const A d = label == j ? d_log_prob * -expm1(log_p) : -p * d_log_prob;
      x[j] = (d - p * d_entropy * (log_p + entropy)) * inverse_temperature;
    }
    store(row + first, x);
  }
}
}  // namespace

template <class T, class A>
void log_prob_forward_cuda(const LogProbForward<T, A>& in, CudaStream stream) {
  if (in.num_rows == 0) return;
  with_pack<kFullPack<T>>(fits_packs(in.width, kFullPack<T>, in.logits), [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const auto blocks = static_cast<unsigned>(std::min(in.num_rows, kMaxBlocks));
    launch(forward_kernel<T, A, kPack>, blocks, threads_for(in.width / kPack, kForwardThreads), 0, stream, in,
           static_cast<A>(1 / in.temperature));
  });
}

template <class T, class A>
void log_prob_backward_cuda(const LogProbBackward<T, A>& in, CudaStream stream) {
  if (in.num_rows == 0) return;
  with_pack<kFullPack<T>>(fits_packs(in.width, kFullPack<T>, in.logits), [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const dim3 blocks(static_cast<unsigned>(divide_up(in.width / kPack, kBackwardThreads)),
                      static_cast<unsigned>(std::min(in.num_rows, kMaxBlocks)));
    launch(backward_kernel<T, A, kPack>, blocks, kBackwardThreads, 0, stream, in,
           static_cast<A>(1 / in.temperature));
  });
}

#define INSTANTIATE(T, A)                                                             \
  template void log_prob_forward_cuda<T, A>(const LogProbForward<T, A>&, CudaStream); \
  template void log_prob_backward_cuda<T, A>(const LogProbBackward<T, A>&, CudaStream);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough

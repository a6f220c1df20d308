// One CUDA thread block samples one token. It reads the row of logits twice: first for the largest logit,
// then for the sums of exponentials. Each sum is of 256 consecutive tokens and is computed by one warp. The
// first warp then finds the 256 tokens in whose sum the uniform number falls, and the token among them.
#include "kernels/common/cuda_kernel.cuh"
#include "kernels/log_prob/log_prob_cuda.h"

namespace bough {

namespace {

constexpr unsigned kWholeWarp = 0xFFFFFFFFu;
template <class A>
constexpr int kDrawThreads = sizeof(A) == 8 ? 512 : 1024;  // exp in fp64 needs twice the registers
constexpr int kLaneTokens = 8;
constexpr int kBlockTokens = kWarp * kLaneTokens;

__device__ inline float exponential(float x) {
  return expf(x);
}
__device__ inline double exponential(double x) {
  return exp(x);
}

// Loads this lane's eight of 256 consecutive tokens, with -infinity beyond the end of the row.
template <class T, class A, int kPack>
__device__ inline void read_tokens(A (&x)[kLaneTokens], const T* row, int64_t begin, int64_t width) {
#pragma unroll
  for (int i = 0; i < kLaneTokens; i += kPack) {
    A pack[kPack];
    if (begin + i < width) load<A, T, kPack>(pack, row + begin + i);
#pragma unroll
    for (int j = 0; j < kPack; ++j) x[i + j] = begin + i < width ? pack[j] : -INFINITY;
  }
}

template <class A>
__device__ inline A warp_max(A x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const A other = __shfl_xor_sync(kWholeWarp, x, offset);
    x = other > x ? other : x;
  }
  return x;
}

// Lays `count` weights end to end on a line from 0, returns the index of the weight that contains `target`,
// and subtracts the weights before it from `target`. Rounding may leave `target` beyond all weights; then
// returns the index of the last positive weight.
template <class Weight>
__device__ inline int find(int count, double& target, Weight&& weight) {
  int last = 0;
  double before_last = target;
  for (int i = 0; i < count; ++i) {
    const double w = weight(i);
    if (w > 0) {
      last = i;
      before_last = target;
    }
    if (target < w) return i;
    target -= w;
  }
  target = before_last;
  return last;
}

template <class T, class A, int kPack>
__global__ void __launch_bounds__(kDrawThreads<A>) draw_token_kernel(const DrawTokenCuda<T> in) {
  constexpr int kDrawWarps = kDrawThreads<A> / kWarp;
  const double* request = in.requests + static_cast<int64_t>(blockIdx.x) * 4;
  const T* row = in.logits + static_cast<int64_t>(request[0]) * in.width;
  const A inverse_temperature = static_cast<A>(1 / request[1]);
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  const int num_blocks = static_cast<int>((in.width + kBlockTokens - 1) / kBlockTokens);
  double* const sums = reinterpret_cast<double*>(dynamic_shared_memory());  // one per 256 tokens
  double* const raw_sums = sums + num_blocks;                               // of each warp
  A* const maxima = reinterpret_cast<A*>(raw_sums + kDrawWarps);
  int64_t* const firsts = reinterpret_cast<int64_t*>(raw_sums + 2 * kDrawWarps);  // first argmax of each warp

  A largest = -INFINITY;
#pragma unroll 2
  for (int block = warp; block < num_blocks; block += kDrawWarps) {
    A x[kLaneTokens];
    read_tokens<T, A, kPack>(x, row, static_cast<int64_t>(block) * kBlockTokens + lane * kLaneTokens,
                             in.width);
#pragma unroll
    for (const A logit : x) largest = logit > largest ? logit : largest;  // a NaN makes the sums NaN
  }
  largest = warp_max(largest);
  if (lane == 0) maxima[warp] = largest;
  __syncthreads();
  for (int w = 0; w < kDrawWarps; ++w) largest = maxima[w] > largest ? maxima[w] : largest;

  double raw_sum = 0;
  int64_t first = in.width;
#pragma unroll 2
  for (int block = warp; block < num_blocks; block += kDrawWarps) {
    A x[kLaneTokens], raw = 0, sum = 0;
    const int64_t begin = static_cast<int64_t>(block) * kBlockTokens + lane * kLaneTokens;
    read_tokens<T, A, kPack>(x, row, begin, in.width);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      if (x[i] == largest && begin + i < first) first = begin + i;
      raw += exponential(x[i] - largest);
      if (inverse_temperature != 1) sum += exponential((x[i] - largest) * inverse_temperature);
    }
    const double block_raw = warp_sum(static_cast<double>(raw));
    const double block_sum = inverse_temperature != 1 ? warp_sum(static_cast<double>(sum)) : block_raw;
    raw_sum += block_raw;
    if (lane == 0) sums[block] = block_sum;
  }
  first = -warp_max(-first);
  if (lane == 0) {
    raw_sums[warp] = raw_sum;
    firsts[warp] = first;
  }
  __syncthreads();
  if (warp != 0) return;

  // Each lane has a few consecutive blocks.
  const int lane_blocks = (num_blocks + kWarp - 1) / kWarp, first_block = lane * lane_blocks;
  double lane_sum = 0, total = 0;
  for (int i = 0; i < lane_blocks; ++i)
    if (first_block + i < num_blocks) lane_sum += sums[first_block + i];
  for (int i = 0; i < kWarp; ++i) total += __shfl_sync(kWholeWarp, lane_sum, i);
  double target = request[2] * total;
  const int chosen_lane = find(kWarp, target, [&](int i) { return __shfl_sync(kWholeWarp, lane_sum, i); });
  const int begin_block = chosen_lane * lane_blocks;
  const int block = begin_block + find(min(lane_blocks, max(0, num_blocks - begin_block)), target,
                                       [&](int i) { return sums[begin_block + i]; });
  A x[kLaneTokens];
  const int64_t begin = static_cast<int64_t>(block) * kBlockTokens + lane * kLaneTokens;
  read_tokens<T, A, kPack>(x, row, begin, in.width);
  double weights[kLaneTokens], weight = 0;
#pragma unroll
  for (int i = 0; i < kLaneTokens; ++i) {
    weights[i] = static_cast<double>(exponential((x[i] - largest) * inverse_temperature));
    weight += weights[i];
  }
  const int token_lane = find(kWarp, target, [&](int i) { return __shfl_sync(kWholeWarp, weight, i); });
  if (lane != token_lane) return;
  int64_t token = begin + find(kLaneTokens, target, [&](int i) { return weights[i]; });
  raw_sum = 0;
  for (int w = 0; w < kDrawWarps; ++w) raw_sum += raw_sums[w];
  if (request[3] != 0) {
    token = firsts[0];
    for (int w = 1; w < kDrawWarps; ++w) token = firsts[w] < token ? firsts[w] : token;
  }
  token = token < in.width ? token : 0;  // no token is found if the row is not finite
  double* const drawn = in.drawn + static_cast<int64_t>(blockIdx.x) * 5;
  drawn[0] = static_cast<double>(token);
  drawn[1] = static_cast<double>(widen(row[token]));
  drawn[2] = static_cast<double>(largest);
  drawn[3] = raw_sum;
  drawn[4] = total;
}

}  // namespace

template <class T>
void draw_token_cuda(const DrawTokenCuda<T>& in, CudaStream stream) {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  if (in.num_draws == 0) return;
  const int64_t bytes = (divide_up(in.width, kBlockTokens) + 3 * kDrawThreads<A> / kWarp) * 8;
  with_pack<kFullPack<T>>(fits_packs(in.width, kFullPack<T>, in.logits), [&](auto pack) {
    launch(draw_token_kernel<T, A, decltype(pack)::value>, dim3(static_cast<unsigned>(in.num_draws)),
           kDrawThreads<A>, static_cast<int>(bytes), stream, in);
  });
}

template void draw_token_cuda<float>(const DrawTokenCuda<float>&, CudaStream);
template void draw_token_cuda<double>(const DrawTokenCuda<double>&, CudaStream);
template void draw_token_cuda<BFloat16Bits>(const DrawTokenCuda<BFloat16Bits>&, CudaStream);

}  // namespace bough

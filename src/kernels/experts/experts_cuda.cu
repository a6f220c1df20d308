#include "kernels/common/cuda_kernel.cuh"
#include "kernels/experts/experts_cuda.h"

namespace bough {

namespace {
constexpr int kRowThreads = 256;

// A stable sort by counting. A thread block finds the rows of one expert, the last block those of indices out
// of range: it counts the pairs of earlier experts, and its own pairs in each warp's share of the pairs. So
// the pairs are read twice per expert, from the cache, and no block waits for another.
__global__ void sort_pairs_kernel(int64_t* pairs, int64_t* places, int32_t* ends, const int64_t* experts,
                                  int64_t num_pairs, int64_t num_experts) {
  __shared__ int num_own[kMaxWarps], num_before[kMaxWarps];
  const int64_t own = blockIdx.x;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  const int64_t share = (num_pairs + num_warps * kWarp - 1) / (num_warps * kWarp) * kWarp;
  const int64_t begin = warp * share, end = min(begin + share, num_pairs);
  // A block later than all others for lanes beyond the end.
  const auto expert_of = [&](int64_t pair) {
    if (pair >= end) return num_experts + 1;
    const int64_t expert = experts[pair];
    return expert >= 0 && expert < num_experts ? expert : num_experts;
  };
  int owned = 0, before = 0;
  for (int64_t at = begin; at < end; at += kWarp) {
    const int64_t expert = expert_of(at + lane);
    owned += __popc(__ballot_sync(0xFFFFFFFFu, expert == own));
    before += __popc(__ballot_sync(0xFFFFFFFFu, expert < own));
  }
  if (lane == 0) {
    num_own[warp] = owned;
    num_before[warp] = before;
  }
  __syncthreads();
  int64_t row = 0, last = 0;  // the warp's first row, the expert's end
  for (int w = 0; w < num_warps; ++w) {
    row += num_before[w] + (w < warp ? num_own[w] : 0);
    last += num_before[w] + num_own[w];
  }
  if (threadIdx.x == 0 && own < num_experts) ends[own] = static_cast<int32_t>(last);
  for (int64_t at = begin; at < end; at += kWarp) {
    const bool is_own = expert_of(at + lane) == own;
    const unsigned owners = __ballot_sync(0xFFFFFFFFu, is_own);
    if (is_own) {
      const int64_t to = row + __popc(owners & ((1u << lane) - 1));
      pairs[to] = at + lane;
      places[at + lane] = own < num_experts ? to : -1;
    }
    row += __popc(owners);
  }
}

template <class T, class A, int kPack>
__global__ void add_weighted_rows_kernel(WeightedRows<T, A> sums) {
  const int64_t d = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack;
  if (d >= sums.width) return;
  for (int64_t t = blockIdx.y; t < sums.num_tokens; t += gridDim.y) {
    A sum[kPack];
    if (sums.residual) {
      load(sum, sums.residual + t * sums.width + d);
    } else {
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum[j] = 0;
    }
    for (int64_t k = 0; k < sums.num_chosen; ++k) {
      const int64_t place = sums.places[t * sums.num_chosen + k];
      const A weight = sums.weights ? sums.weights[t * sums.num_chosen + k] : A(1);
      A row[kPack];
      if (place >= 0) load(row, sums.rows + place * sums.width + d);
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum[j] += place >= 0 ? weight * row[j] : static_cast<A>(NAN);
    }
    store(sums.y + t * sums.width + d, sum);
  }
}

// A thread block computes a row.
template <class T, class A, int kPack>
__global__ void weigh_rows_kernel(A* d_weights, T* a, T* d_gate_up, const T* d_a, const A* weights,
                                  int64_t num_rows, int64_t width) {
  __shared__ A scratch[kMaxWarps];
  for (int64_t p = blockIdx.x; p < num_rows; p += gridDim.x) {
    const A weight = weights[p];
    A dot = 0;
    for (int64_t f = threadIdx.x * kPack; f < width; f += blockDim.x * kPack) {
      A x[kPack], d_x[kPack];
      load(x, a + p * width + f);
      load(d_x, d_a + p * width + f);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        dot += d_x[j] * x[j];
        x[j] *= weight;
      }
      store(a + p * width + f, x);
    }
    for (int64_t f = threadIdx.x * kPack; f < 2 * width; f += blockDim.x * kPack) {
      A x[kPack];
      load(x, d_gate_up + 2 * p * width + f);
#pragma unroll
      for (int j = 0; j < kPack; ++j) x[j] *= weight;
      store(d_gate_up + 2 * p * width + f, x);
    }
    dot = block_sum(dot, scratch);
    if (threadIdx.x == 0) d_weights[p] = dot;
  }
}
}  // namespace

void sort_pairs_cuda(int64_t* pairs, int64_t* places, int32_t* ends, const int64_t* experts,
                     int64_t num_pairs, int64_t num_experts, CudaStream stream) {
  launch(sort_pairs_kernel, static_cast<unsigned>(num_experts + 1), threads_for(num_pairs, 1024), 0, stream,
         pairs, places, ends, experts, num_pairs, num_experts);
}

template <class T, class A>
void add_weighted_rows_cuda(const WeightedRows<T, A>& sums, CudaStream stream) {
  if (sums.num_tokens * sums.width == 0) return;
  with_pack<kFullPack<T>>(fits_packs(sums.width, kFullPack<T>, sums.y, sums.rows, sums.residual),
                          [&](auto pack) {
                            constexpr int kPack = decltype(pack)::value;
                            const int threads = threads_for(sums.width / kPack, kRowThreads);
                            const dim3 blocks(static_cast<unsigned>(divide_up(sums.width / kPack, threads)),
                                              static_cast<unsigned>(std::min(sums.num_tokens, kMaxBlocks)));
                            launch(add_weighted_rows_kernel<T, A, kPack>, blocks, threads, 0, stream, sums);
                          });
}

template <class T, class A>
void weigh_rows_cuda(A* d_weights, T* a, T* d_gate_up, const T* d_a, const A* weights, int64_t num_rows,
                     int64_t width, CudaStream stream) {
  if (num_rows == 0) return;
  with_pack<kFullPack<T>>(fits_packs(width, kFullPack<T>, a, d_gate_up, d_a), [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    launch(weigh_rows_kernel<T, A, kPack>, static_cast<unsigned>(std::min(num_rows, kMaxBlocks)),
           threads_for(2 * width / kPack, kRowThreads), 0, stream, d_weights, a, d_gate_up, d_a, weights,
           num_rows, width);
  });
}

#define INSTANTIATE(T, A)                                                            \
  template void add_weighted_rows_cuda<T, A>(const WeightedRows<T, A>&, CudaStream); \
  template void weigh_rows_cuda<T, A>(A*, T*, T*, const T*, const A*, int64_t, int64_t, CudaStream);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough

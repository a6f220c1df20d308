// One thread block processes one row at a time. Backward sums the weight's gradient in two stages. First each
// thread block sums over its rows, in shared memory if a row of sums fits. Then the sums of all thread blocks
// are added in order.
#include "kernels/common/cuda_kernel.cuh"
#include "kernels/rms_norm/rms_norm_cuda.h"

namespace bough {

namespace {
constexpr int kThreads = 256;
// The shared memory that every device gives a block by default, minus the scratch of block_sum.
constexpr int64_t kSharedBytes = 47 * 1024;

template <class T, class A, int kPack>
__global__ void forward_kernel(T* y, A* rstd, const T* x, const T* weight, int64_t num_rows, int64_t width,
                               A eps, A offset) {
  __shared__ A scratch[kMaxWarps];
  const int64_t first = threadIdx.x * kPack;
  const int64_t step = blockDim.x * kPack;
  for (int64_t r = blockIdx.x; r < num_rows; r += gridDim.x) {
    A sum = 0;
    for (int64_t d = first; d < width; d += step) {
      A x_d[kPack];
      load(x_d, x + r * width + d);
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum += x_d[j] * x_d[j];
    }
    const A scale = A(1) / sqrt(block_sum(sum, scratch) / static_cast<A>(width) + eps);
    if (threadIdx.x == 0) rstd[r] = scale;
    for (int64_t d = first; d < width; d += step) {
      A x_d[kPack], w_d[kPack];
      load(x_d, x + r * width + d);
      load(w_d, weight + d);
#pragma unroll
      for (int j = 0; j < kPack; ++j) x_d[j] = x_d[j] * scale * (w_d[j] + offset);
      store(y + r * width + d, x_d);
    }
  }
}

// Forward: y = x · rstd · w. Backward, with g = d_y · w:
// d_x = rstd · (g - x · rstd² · mean(g · x)), and each thread adds d_y · x · rstd to the sums of its own
// columns.
template <class T, class A, int kPack>
__global__ void backward_kernel(RmsNormBackward<T, A> in, bool in_shared) {
  BOUGH_DYNAMIC_SHARED(shared, 16);
  __shared__ A scratch[kMaxWarps];
  A* part = in.partial + blockIdx.x * in.width;
  A* sums = in_shared ? reinterpret_cast<A*>(shared) : part;
  const int64_t first = threadIdx.x * kPack;
  const int64_t step = blockDim.x * kPack;
  const A zeros[kPack] = {};
  for (int64_t d = first; d < in.width; d += step) store(sums + d, zeros);
  for (int64_t r = blockIdx.x; r < in.num_rows; r += gridDim.x) {
    const T* x = in.x + r * in.width;
    const T* d_y = in.d_y + r * in.width;
    A dot = 0;
    for (int64_t d = first; d < in.width; d += step) {
      A x_d[kPack], d_y_d[kPack], w_d[kPack];
      load(x_d, x + d);
      load(d_y_d, d_y + d);
      load(w_d, in.weight + d);
#pragma unroll
      for (int j = 0; j < kPack; ++j) dot += d_y_d[j] * (w_d[j] + in.weight_offset) * x_d[j];
    }
    const A scale = in.rstd[r];
    const A mean = block_sum(dot, scratch) * scale * scale / static_cast<A>(in.width);
    for (int64_t d = first; d < in.width; d += step) {
      A x_d[kPack], d_y_d[kPack], w_d[kPack], sum_d[kPack], residual_d[kPack] = {};
      load(x_d, x + d);
      load(d_y_d, d_y + d);
      load(w_d, in.weight + d);
      load(sum_d, sums + d);
      if (in.residual) load(residual_d, in.residual + r * in.width + d);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        const A d_y_j = d_y_d[j], w_j = w_d[j] + in.weight_offset;
        sum_d[j] += d_y_j * x_d[j] * scale;
        d_y_d[j] = x_d[j] * scale * w_j;
        x_d[j] = scale * (d_y_j * w_j - x_d[j] * mean) + residual_d[j];
      }
      store(sums + d, sum_d);
      if (in.y) store(in.y + r * in.width + d, d_y_d);
      store(in.d_x + r * in.width + d, x_d);
    }
  }
  if (!in_shared) return;
  for (int64_t d = first; d < in.width; d += step) {  // a thread reads only elements that it wrote itself
    A sum_d[kPack];
    load(sum_d, sums + d);
    store(part + d, sum_d);
  }
}
}  // namespace

// A part is the sum of one thread block. It has about 8 rows or more, because with fewer the second stage
// costs as much as the first. 512 parts fill the largest devices.
int64_t rms_norm_num_parts(int64_t num_rows) {
  return std::clamp<int64_t>(divide_up(num_rows, 8), 1, 512);
}

template <class T, class A>
void rms_norm_forward_cuda(T* y, A* rstd, const T* x, const T* weight, int64_t num_rows, int64_t width,
                           const NormSettings& norm, CudaStream stream) {
  if (num_rows == 0) return;
  with_pack<kFullPack<T>>(fits_packs(width, kFullPack<T>, y, x, weight), [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const auto blocks = static_cast<unsigned>(std::min(num_rows, kMaxBlocks));
    launch(forward_kernel<T, A, kPack>, blocks, threads_for(width / kPack, kThreads), 0, stream, y, rstd, x,
           weight, num_rows, width, static_cast<A>(norm.eps), static_cast<A>(norm.weight_offset));
  });
}

template <class T, class A>
void rms_norm_backward_cuda(const RmsNormBackward<T, A>& in, CudaStream stream) {
  if (in.num_rows == 0) return;
  const int64_t num_parts = rms_norm_num_parts(in.num_rows);
  const int64_t bytes = in.width * static_cast<int64_t>(sizeof(A));
  const bool in_shared = bytes <= kSharedBytes;
  const bool packs =
      fits_packs(in.width, kFullPack<T>, in.d_x, in.y, in.partial, in.d_y, in.x, in.weight, in.residual);
  with_pack<kFullPack<T>>(packs, [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    launch(backward_kernel<T, A, kPack>, static_cast<unsigned>(num_parts),
           threads_for(in.width / kPack, kThreads), in_shared ? bytes : 0, stream, in, in_shared);
  });
  add_parts(in.d_weight, in.partial, num_parts, in.width, in.width, stream);
}

#define INSTANTIATE(T, A)                                                                 \
  template void rms_norm_forward_cuda<T, A>(T*, A*, const T*, const T*, int64_t, int64_t, \
                                            const NormSettings&, CudaStream);             \
  template void rms_norm_backward_cuda<T, A>(const RmsNormBackward<T, A>&, CudaStream);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough

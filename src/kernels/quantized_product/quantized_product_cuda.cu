// A CUDA thread block computes 16 rows of the weight times up to 64 rows of x. Its eight warps share the
// inner dimension: they take its pieces of 64 in turn, so that few thread blocks already use much memory
// bandwidth. The warps' sums are added in shared memory, in the order of the warps.
//
// In a product of tensor-core fragments, the elements along the inner dimension may have any order if both
// factors have the same order. A lane loads 16 neighbouring weights of one row in one load, and uses four of
// them in each of four products. In the standard order, a lane's pairs would be far apart. The lane loads its
// row of x in the same order.
#include <cmath>
#include <limits>

#include "kernels/common/cuda_kernel.cuh"
#include "kernels/common/cuda_mma.cuh"
#include "kernels/quantized_product/quantized_product_cuda.h"

namespace bough {

namespace {
constexpr int kQuantizeThreads = 256;
constexpr int kOutputs = 16, kWarps = 8, kStep = 64;
constexpr unsigned kAll = 0xFFFFFFFFu;

// As integers, the bits of |w| have the same order as |w|, with NaN above infinity.
template <class T>
__global__ void quantize_kernel(int8_t* quantized, float* scale, const T* weight, int64_t rows,
                                int64_t width) {
  __shared__ int largest_of[kMaxWarps];
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const T* row = weight + r * width;
    int most = 0;
    for (int64_t k = threadIdx.x; k < width; k += blockDim.x)
      most = max(most, __float_as_int(static_cast<float>(widen(row[k]))) & 0x7FFFFFFF);
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
      most = max(most, __shfl_xor_sync(kAll, most, offset));
    __syncthreads();  // all threads have read the previous row's maxima
    if (threadIdx.x % kWarp == 0) largest_of[threadIdx.x / kWarp] = most;
    __syncthreads();
    for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) most = max(most, largest_of[warp]);
    const float largest = __int_as_float(most), steps = 127 / largest;
    const bool usable = isfinite(largest) && isfinite(steps);
    if (threadIdx.x == 0)
      scale[r] = isfinite(largest) ? largest / 127 : std::numeric_limits<float>::quiet_NaN();
    for (int64_t k = threadIdx.x; k < width; k += blockDim.x)
      quantized[r * width + k] =
          usable ? static_cast<int8_t>(rintf(static_cast<float>(widen(row[k])) * steps)) : int8_t{0};
  }
}

__device__ inline uint32_t widen_two(uint32_t bytes, int first) {
  const auto at = [&](int i) { return static_cast<float>(static_cast<int8_t>(bytes >> (8 * i))); };
  return pack_bf16(at(first), at(first + 1));
}

// A CUDA thread block computes kTiles tiles of 8 rows of x.
template <int kTiles>
__global__ void product_kernel(QuantizedProductCuda p) {
  __shared__ float sums[kWarps][kOutputs][8 * kTiles];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, row = lane / 4, quarter = lane % 4;
  const int64_t first_output = static_cast<int64_t>(blockIdx.x) * kOutputs;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * 8 * kTiles;
  float c[kTiles][4] = {};
  for (int64_t k = static_cast<int64_t>(warp) * kStep + quarter * 16; k - quarter * 16 < p.inputs;
       k += kWarps * kStep) {
    const bool in_depth = k < p.inputs;
    uint4 weights[2];  // those of weight rows `row` and `row + 8`
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t output = first_output + row + half * 8;
      weights[half] = in_depth && output < p.outputs
                          ? *reinterpret_cast<const uint4*>(p.weight + output * p.inputs + k)
                          : uint4{0, 0, 0, 0};
    }
    const uint32_t words[2][4] = {{weights[0].x, weights[0].y, weights[0].z, weights[0].w},
                                  {weights[1].x, weights[1].y, weights[1].z, weights[1].w}};
    uint32_t a[4][4];
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int r = 0; r < 4; ++r) a[s][r] = widen_two(words[r % 2][s], r / 2 * 2);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int64_t x_row = first_row + n * 8 + row;
      const bool valid = in_depth && x_row < p.rows;
      const auto* from = reinterpret_cast<const uint4*>(p.x + x_row * p.inputs + k);
      const uint4 low = valid ? from[0] : uint4{0, 0, 0, 0}, high = valid ? from[1] : uint4{0, 0, 0, 0};
      multiply_add(c[n], a[0], low.x, low.y);
      multiply_add(c[n], a[1], low.z, low.w);
      multiply_add(c[n], a[2], high.x, high.y);
      multiply_add(c[n], a[3], high.z, high.w);
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[warp][row + e / 2 * 8][n * 8 + quarter * 2 + e % 2] = c[n][e];
  __syncthreads();
  for (int i = threadIdx.x; i < kOutputs * 8 * kTiles; i += blockDim.x) {
    const int64_t output = first_output + i % kOutputs, x_row = first_row + i / kOutputs;
    if (output >= p.outputs || x_row >= p.rows) continue;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w][i % kOutputs][i / kOutputs];
    sum *= p.scale[output];
    if (p.bias) sum += widen(p.bias[output]);
    const int64_t at = x_row * p.outputs + output;
    if (p.residual) sum += widen(p.residual[at]);
    round_to(p.y + at, sum);
  }
}

template <int kTiles>
void launch_product(const QuantizedProductCuda& p, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(divide_up(p.outputs, kOutputs)),
                    static_cast<unsigned>(divide_up(p.rows, 8 * kTiles)));
  launch(product_kernel<kTiles>, blocks, kWarps * kWarp, 0, stream, p);
}
}  // namespace

template <class T>
void quantize_rows_cuda(int8_t* quantized, float* scale, const T* weight, int64_t rows, int64_t width,
                        CudaStream stream) {
  if (rows == 0) return;
  const auto blocks = static_cast<unsigned>(std::min(rows, kMaxBlocks));
  launch(quantize_kernel<T>, blocks, threads_for(width, kQuantizeThreads), 0, stream, quantized, scale,
         weight, rows, width);
}
template void quantize_rows_cuda<float>(int8_t*, float*, const float*, int64_t, int64_t, CudaStream);
template void quantize_rows_cuda<double>(int8_t*, float*, const double*, int64_t, int64_t, CudaStream);
template void quantize_rows_cuda<BFloat16Bits>(int8_t*, float*, const BFloat16Bits*, int64_t, int64_t,
                                               CudaStream);

bool fits_quantized_product_cuda(const QuantizedProductCuda& p) {
  return fits_packs(p.inputs, 16, p.x, p.weight);
}

void quantized_product_cuda(const QuantizedProductCuda& p, CudaStream stream) {
  if (p.rows == 0 || p.outputs == 0) return;
  if (p.rows <= 8) launch_product<1>(p, stream);
  else if (p.rows <= 16) launch_product<2>(p, stream);
  else if (p.rows <= 32) launch_product<4>(p, stream);
  else launch_product<8>(p, stream);
}

}  // namespace bough

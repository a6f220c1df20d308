// The sum has two stages. First each block of kPartElements elements is summed separately. Then one thread
// block sums the parts.
#include "kernels/adamw/adamw_cuda.h"
#include "kernels/common/cuda_kernel.cuh"

namespace bough {

namespace {
constexpr int kThreads = 256;
constexpr int kLastThreads = 1024;
// A thread sums 64 elements: enough loads to hide the reduction, and few enough parts for one last thread
// block to sum.
constexpr int64_t kPartElements = 64 * kThreads;

template <class T, int kPack>
__global__ void part_kernel(double* partial, const T* x, int64_t size, int64_t num_parts) {
  __shared__ double scratch[kMaxWarps];
  for (int64_t part = blockIdx.x; part < num_parts; part += gridDim.x) {
    const int64_t begin = part * kPartElements;
    const int64_t end = size - begin < kPartElements ? size : begin + kPartElements;
    double sum = 0;
    for (int64_t i = begin + threadIdx.x * kPack; i < end; i += kThreads * kPack) {
      double x_i[kPack];
      load(x_i, x + i);
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum += x_i[j] * x_i[j];
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) partial[part] = sum;
  }
}

__global__ void last_kernel(double* result, const double* partial, int64_t num_parts) {
  __shared__ double scratch[kMaxWarps];
  double sum = 0;
  for (int64_t part = threadIdx.x; part < num_parts; part += kLastThreads) sum += partial[part];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) *result = sum;
}
}  // namespace

int64_t sum_of_squares_num_parts(int64_t size) {
  return divide_up(size, kPartElements);
}

template <class T>
void sum_of_squares_cuda(double* result, double* partial, const T* x, int64_t size, CudaStream stream) {
  const int64_t num_parts = sum_of_squares_num_parts(size);
  if (num_parts > 0) {
    with_pack<kFullPack<T>>(fits_packs(size, kFullPack<T>, x), [&](auto pack) {
      constexpr int kPack = decltype(pack)::value;
      launch(part_kernel<T, kPack>, static_cast<unsigned>(std::min(num_parts, kMaxBlocks)), kThreads, 0,
             stream, partial, x, size, num_parts);
    });
  }
  launch(last_kernel, 1, kLastThreads, 0, stream, result, partial, num_parts);
}

template void sum_of_squares_cuda<float>(double*, double*, const float*, int64_t, CudaStream);
template void sum_of_squares_cuda<BFloat16Bits>(double*, double*, const BFloat16Bits*, int64_t, CudaStream);
template void sum_of_squares_cuda<double>(double*, double*, const double*, int64_t, CudaStream);

}  // namespace bough

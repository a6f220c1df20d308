// Grid x covers the columns, grid y the sorted tokens. The thread at a token's first row adds all rows of
// this token one after the other, so that their order is fixed without atomics.
#include "kernels/common/cuda_kernel.cuh"
#include "kernels/embedding/embedding_cuda.h"
namespace bough {

namespace {
constexpr int kThreads = 128;

template <class T, class A, int kPack>
__global__ void add_rows_kernel(EmbeddingGradient<T, A> g) {
  const int64_t f = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack;
  if (f >= g.width) return;
  for (int64_t i = blockIdx.y; i < g.num_rows; i += gridDim.y) {
    const int64_t token = g.tokens[i];
    if (i > 0 && g.tokens[i - 1] == token) continue;
    A sum[kPack], row[kPack];
    load(sum, g.sums + token * g.width + f);
    for (int64_t j = i; j < g.num_rows && g.tokens[j] == token; ++j) {
      load(row, g.rows + g.order[j] * g.width + f);
#pragma unroll
      for (int p = 0; p < kPack; ++p) sum[p] += row[p];
    }
    store(g.sums + token * g.width + f, sum);
  }
}
}  // namespace

template <class T, class A>
void add_embedding_gradient_cuda(const EmbeddingGradient<T, A>& gradient, CudaStream stream) {
  if (gradient.num_rows * gradient.width == 0) return;
  with_pack<kFullPack<T>>(
      fits_packs(gradient.width, kFullPack<T>, gradient.sums, gradient.rows), [&](auto pack) {
        constexpr int kPack = decltype(pack)::value;
        const dim3 blocks(static_cast<unsigned>(divide_up(gradient.width / kPack, kThreads)),
                          static_cast<unsigned>(std::min(gradient.num_rows, kMaxBlocks)));
        launch(add_rows_kernel<T, A, kPack>, blocks, kThreads, 0, stream, gradient);
      });
}

#define INSTANTIATE(T, A) \
  template void add_embedding_gradient_cuda<T, A>(const EmbeddingGradient<T, A>&, CudaStream);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough

// AdamW is elementwise and memory-bound, so each of the five arrays is read and written once.
#include "kernels/adamw/adamw_cuda.h"
#include "kernels/common/cuda_kernel.cuh"

namespace bough {

namespace {
constexpr int kThreads = 256;

template <class T, class A, int kPack>
__global__ void adamw_kernel(AdamwArrays<T, A> a, AdamwScalars<A> s) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kPack;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kPack; i < a.size;
       i += step) {
    A w[kPack], m[kPack], v[kPack], g[kPack];
    if (a.master == nullptr) {
      load(w, a.value + i);
    } else {
      load(w, a.master + i);
    }
    load(m, a.exp_avg + i);
    load(v, a.exp_avg_sq + i);
    load(g, a.gradient + i);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const A scaled = g[j] * s.gradient_scale;
      m[j] = s.beta1 * m[j] + s.one_minus_beta1 * scaled;
      v[j] = s.beta2 * v[j] + s.one_minus_beta2 * (scaled * scaled);
      w[j] = w[j] * s.decay - s.step_size * m[j] / (sqrt(v[j] * s.inverse_variance) + s.eps);
      g[j] = 0;
    }
    store(a.exp_avg + i, m);
    store(a.exp_avg_sq + i, v);
    store(a.gradient + i, g);
    store(a.value + i, w);
    if (a.master != nullptr) store(a.master + i, w);
  }
}
}  // namespace

template <class T, class A>
void adamw_cuda(const AdamwArrays<T, A>& a, const AdamwScalars<A>& scalars, CudaStream stream) {
  if (a.size == 0) return;
  constexpr int kArrayPack = kFullPack<A>;  // the arrays of the accumulator type are the widest
  const bool packs = fits_packs(a.size, kArrayPack, a.value, a.master, a.exp_avg, a.exp_avg_sq,
                                a.gradient);  // nullptr counts as aligned
  with_pack<kArrayPack>(packs, [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const int64_t blocks = std::min(divide_up(a.size, kThreads * kPack), kMaxBlocks);
    launch(adamw_kernel<T, A, kPack>, static_cast<unsigned>(blocks), kThreads, 0, stream, a, scalars);
  });
}

#define INSTANTIATE(T, A) \
  template void adamw_cuda<T, A>(const AdamwArrays<T, A>&, const AdamwScalars<A>&, CudaStream);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough

// SwiGLU is elementwise. Grid x covers the columns, grid y the rows, so that no thread needs a division to
// find its row.
#include "kernels/common/cuda_kernel.cuh"
#include "kernels/swiglu/swiglu_cuda.h"

namespace bough {

namespace {
constexpr int kThreads = 256;

template <class T>
using Acc = std::conditional_t<std::is_same_v<T, double>, double, float>;

// The constants of p(g) and g · p'(g) in swiglu.h.
constexpr double kGelu = 1.5957691216057308, kGeluCube = kGelu * 0.044715;
template <GateActivation kActivation, class A>
__device__ A gate_argument(A g) {
  if constexpr (kActivation == GateActivation::kSilu) return g;
  else return g * (static_cast<A>(kGelu) + static_cast<A>(kGeluCube) * g * g);
}
template <GateActivation kActivation, class A>
__device__ A gate_steepness(A g) {
  if constexpr (kActivation == GateActivation::kSilu) return g;
  else return g * (static_cast<A>(kGelu) + static_cast<A>(3 * kGeluCube) * g * g);
}

template <GateActivation kActivation, class T, int kPack>
__global__ void forward_kernel(T* y, const T* gate_up, int64_t num_rows, int64_t width) {
  using A = Acc<T>;
  const int64_t f = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack;
  if (f >= width) return;
  for (int64_t r = blockIdx.y; r < num_rows; r += gridDim.y) {
    A gate[kPack], up[kPack];
    load(gate, gate_up + 2 * r * width + f);
    load(up, gate_up + (2 * r + 1) * width + f);
#pragma unroll
    for (int j = 0; j < kPack; ++j)
      gate[j] = gate[j] / (1 + exp(-gate_argument<kActivation>(gate[j]))) * up[j];
    store(y + r * width + f, gate);
  }
}

// Forward: y = g · s · u with s = sigmoid(p(g)).
// Backward: d_g = d_y · u · s · (1 + g · p'(g) · (1 - s)),
// d_u = d_y · g · s.
template <GateActivation kActivation, class T, int kPack>
__global__ void backward_kernel(T* d_gate_up, T* y, const T* d_y, const T* gate_up, int64_t num_rows,
                                int64_t width) {
  using A = Acc<T>;
  const int64_t f = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack;
  if (f >= width) return;
  for (int64_t r = blockIdx.y; r < num_rows; r += gridDim.y) {
    A gate[kPack], up[kPack], d[kPack];
    load(gate, gate_up + 2 * r * width + f);
    load(up, gate_up + (2 * r + 1) * width + f);
    load(d, d_y + r * width + f);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const A g = gate[j];
      const A s = 1 / (1 + exp(-gate_argument<kActivation>(g)));
      const A u = up[j];
      gate[j] = d[j] * u * s * (1 + gate_steepness<kActivation>(g) * (1 - s));
      up[j] = d[j] * g * s;
      d[j] = g * s * u;
    }
    store(d_gate_up + 2 * r * width + f, gate);
    store(d_gate_up + (2 * r + 1) * width + f, up);
    store(y + r * width + f, d);
  }
}

dim3 blocks_for(int64_t num_rows, int64_t num_packs) {
  return {static_cast<unsigned>(divide_up(num_packs, kThreads)),
          static_cast<unsigned>(std::min(num_rows, kMaxBlocks))};
}
}  // namespace

template <class T>
void swiglu_forward_cuda(T* y, const T* gate_up, int64_t num_rows, int64_t width, GateActivation activation,
                         CudaStream stream) {
  if (num_rows * width == 0) return;
  with_pack<kFullPack<T>>(fits_packs(width, kFullPack<T>, y, gate_up), [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const auto kernel = activation == GateActivation::kSilu
                            ? forward_kernel<GateActivation::kSilu, T, kPack>
                            : forward_kernel<GateActivation::kGeluTanh, T, kPack>;
    launch(kernel, blocks_for(num_rows, width / kPack), kThreads, 0, stream, y, gate_up, num_rows, width);
  });
}

template <class T>
void swiglu_backward_cuda(T* d_gate_up, T* y, const T* d_y, const T* gate_up, int64_t num_rows, int64_t width,
                          GateActivation activation, CudaStream stream) {
  if (num_rows * width == 0) return;
  with_pack<kFullPack<T>>(fits_packs(width, kFullPack<T>, d_gate_up, y, d_y, gate_up), [&](auto pack) {
    constexpr int kPack = decltype(pack)::value;
    const auto kernel = activation == GateActivation::kSilu
                            ? backward_kernel<GateActivation::kSilu, T, kPack>
                            : backward_kernel<GateActivation::kGeluTanh, T, kPack>;
    launch(kernel, blocks_for(num_rows, width / kPack), kThreads, 0, stream, d_gate_up, y, d_y, gate_up,
           num_rows, width);
  });
}

#define INSTANTIATE(T)                                                                                \
  template void swiglu_forward_cuda<T>(T*, const T*, int64_t, int64_t, GateActivation, CudaStream);   \
  template void swiglu_backward_cuda<T>(T*, T*, const T*, const T*, int64_t, int64_t, GateActivation, \
                                        CudaStream);
INSTANTIATE(float)
INSTANTIATE(BFloat16Bits)
INSTANTIATE(double)

}  // namespace bough

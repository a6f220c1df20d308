// One warp processes one head of one token at a time. A head's elements are contiguous in qkv. A lane holds
// both elements of each of its pairs, so the rotation needs no exchange between lanes. Backward sums the
// norms' gradients in two stages, both in a fixed order: each warp over its heads and the warps of a block,
// then all blocks.
#include "kernels/common/cuda_kernel.cuh"
#include "kernels/qk_norm_rotary/qk_norm_rotary_cuda.h"

namespace bough {

namespace {
constexpr int kWarps = 8;  // per thread block; fewer if the sums of so many warps exceed shared memory
constexpr int64_t kSharedBytes = 48 * 1024;
constexpr int kPairPack = 2;  // heads are short: with longer packs, half of a warp would be idle

// Item i is head i % (N + 2G) of token i / (N + 2G).
template <class T, class A>
struct Head {
  int64_t token;
  int64_t kind;         // 0: q, 1: k, 2: v
  int64_t destination;  // index of its first element in q, k or v
};

template <class T, class A>
__device__ Head<T, A> head_of(const QkNormRotaryInput<T, A>& in, int64_t item) {
  const int64_t heads = in.num_heads + 2 * in.num_kv_heads;
  const int64_t token = item / heads;
  const int64_t head = item % heads;
  if (head < in.num_heads) return {token, 0, (token * in.num_heads + head) * in.head_dim};
  const int64_t kv_head = head - in.num_heads;
  const int64_t kind = kv_head < in.num_kv_heads ? 1 : 2;
  return {token, kind, (token * in.num_kv_heads + kv_head - (kind - 1) * in.num_kv_heads) * in.head_dim};
}

template <class T, int kPack>
__device__ void copy_head(T* to, const T* from, int64_t head_dim) {
  for (int64_t d = threadIdx.x % kWarp * kPack; d < head_dim; d += kWarp * kPack)
    *reinterpret_cast<Pack<T, kPack>*>(to + d) = *reinterpret_cast<const Pack<T, kPack>*>(from + d);
}

template <class T, class A, int kPack>
__device__ A inverse_rms(const T* x, int64_t width, A eps) {
  A sum = 0;
  for (int64_t d = threadIdx.x % kWarp * kPack; d < width; d += kWarp * kPack) {
    A x_d[kPack];
    load(x_d, x + d);
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum += x_d[j] * x_d[j];
  }
  return A(1) / sqrt(warp_sum(sum) / static_cast<A>(width) + eps);
}

template <class T, class A, int kPack>
__device__ void norm_rotate(T* y, const T* x, const A* cos, const A* sin, const T* weight,
                            const QkNormRotaryInput<T, A>& in) {
  const int64_t half = in.num_pairs;
  const A scale = weight == nullptr ? A(1) : inverse_rms<T, A, kPack>(x, in.head_dim, in.eps);
  for (int64_t d = threadIdx.x % kWarp * kPack; d < half; d += kWarp * kPack) {
    A first[kPack], second[kPack], c[kPack], s[kPack];
    load(first, x + d);
    load(second, x + half + d);
    load(c, cos + d);
    load(s, sin + d);
    if (weight != nullptr) {
      A w_first[kPack], w_second[kPack];
      load(w_first, weight + d);
      load(w_second, weight + half + d);
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        first[j] = first[j] * scale * (w_first[j] + in.weight_offset);
        second[j] = second[j] * scale * (w_second[j] + in.weight_offset);
      }
    }
    A y_first[kPack], y_second[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      y_first[j] = first[j] * c[j] - second[j] * s[j];
      y_second[j] = second[j] * c[j] + first[j] * s[j];
    }
    store(y + d, y_first);
    store(y + half + d, y_second);
  }
  for (int64_t d = 2 * half + threadIdx.x % kWarp * kPack; d < in.head_dim; d += kWarp * kPack) {
    A rest[kPack];
    load(rest, x + d);
    if (weight != nullptr) {
      A w_d[kPack];
      load(w_d, weight + d);
#pragma unroll
      for (int j = 0; j < kPack; ++j) rest[j] = rest[j] * scale * (w_d[j] + in.weight_offset);
    }
    store(y + d, rest);
  }
}

template <class T, class A, int kPack>
__global__ void forward_kernel(QkNormRotaryInput<T, A> in, T* q, T* k, T* v) {
  const int64_t num_items = in.num_tokens * (in.num_heads + 2 * in.num_kv_heads);
  const int64_t warps = blockDim.x / kWarp;
  for (int64_t item = blockIdx.x * warps + threadIdx.x / kWarp; item < num_items; item += gridDim.x * warps) {
    const auto head = head_of(in, item);
    const T* x = in.qkv + item * in.head_dim;
    if (head.kind == 2) {
      copy_head<T, kPack>(v + head.destination, x, in.head_dim);
      continue;
    }
    const int64_t angle = head.token * in.num_pairs;
    norm_rotate<T, A, kPack>((head.kind == 0 ? q : k) + head.destination, x, in.cos + angle, in.sin + angle,
                             head.kind == 0 ? in.q_norm : in.k_norm, in);
  }
}

// Inverts the rotation of kPack pairs of a head: elements d + j and half + d + j, for j < kPack.
template <class T, class A, int kPack>
__device__ void unrotate(A (&first)[kPack], A (&second)[kPack], const T* d_y, const A* cos, const A* sin,
                         int64_t half, int64_t d) {
  A c[kPack], s[kPack];
  load(first, d_y + d);
  load(second, d_y + half + d);
  load(c, cos + d);
  load(s, sin + d);
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    const A y_first = first[j];
    first[j] = y_first * c[j] + second[j] * s[j];
    second[j] = second[j] * c[j] - y_first * s[j];
  }
}

template <class T, class A, int kPack>
__device__ void unrotate_head(T* d_x, const T* d_y, const A* cos, const A* sin, int64_t half,
                              int64_t head_dim) {
  for (int64_t d = threadIdx.x % kWarp * kPack; d < half; d += kWarp * kPack) {
    A first[kPack], second[kPack];
    unrotate(first, second, d_y, cos, sin, half, d);
    store(d_x + d, first);
    store(d_x + half + d, second);
  }
  copy_head<T, kPack>(d_x + 2 * half, d_y + 2 * half, head_dim - 2 * half);
}

// The backward of the norm for elements at to at + kPack - 1. g is the gradient with the rotation inverted:
// d_x = rstd · (g·w - x · mean), d_w += g · x · rstd, with mean = rstd² · mean(g·w·x).
template <class T, class A, int kPack>
__device__ void norm_backward(T* d_x, A* sums, const A (&g)[kPack], const T* x, const T* weight, int64_t at,
                              A scale, A mean, A offset) {
  A x_d[kPack], w_d[kPack], sum_d[kPack];
  load(x_d, x + at);
  load(w_d, weight + at);
  load(sum_d, sums + at);
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    sum_d[j] += g[j] * x_d[j] * scale;
    x_d[j] = scale * (g[j] * (w_d[j] + offset) - x_d[j] * mean);
  }
  store(sums + at, sum_d);
  store(d_x + at, x_d);
}

// Forward: y = rotate(x · rstd · w). Backward, with g = d_y with the rotation inverted:
// d_x = rstd · (g·w - x · rstd² · mean(g·w·x)), d_w += g · x · rstd.
template <class T, class A, int kPack>
__device__ void norm_unrotate_head(T* d_x, A* sums, const T* d_y, const T* x, const A* cos, const A* sin,
                                   const T* weight, const QkNormRotaryInput<T, A>& in) {
  const int64_t half = in.num_pairs;
  const A offset = in.weight_offset;
  A squares = 0;
  A dot = 0;
  const int64_t begin = threadIdx.x % kWarp * kPack;
  for (int64_t d = begin; d < half; d += kWarp * kPack) {
    A g_first[kPack], g_second[kPack], x_first[kPack], x_second[kPack], w_first[kPack], w_second[kPack];
    unrotate(g_first, g_second, d_y, cos, sin, half, d);
    load(x_first, x + d);
    load(x_second, x + half + d);
    load(w_first, weight + d);
    load(w_second, weight + half + d);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      squares += x_first[j] * x_first[j] + x_second[j] * x_second[j];
      dot += g_first[j] * (w_first[j] + offset) * x_first[j] +
             g_second[j] * (w_second[j] + offset) * x_second[j];
    }
  }
  for (int64_t d = 2 * half + begin; d < in.head_dim; d += kWarp * kPack) {
    A g_d[kPack], x_d[kPack], w_d[kPack];
    load(g_d, d_y + d);
    load(x_d, x + d);
    load(w_d, weight + d);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      squares += x_d[j] * x_d[j];
      dot += g_d[j] * (w_d[j] + offset) * x_d[j];
    }
  }
  const A width = static_cast<A>(in.head_dim);
  const A scale = A(1) / sqrt(warp_sum(squares) / width + in.eps);
  const A mean = warp_sum(dot) * scale * scale / width;
  for (int64_t d = begin; d < half; d += kWarp * kPack) {
    A g_first[kPack], g_second[kPack];
    unrotate(g_first, g_second, d_y, cos, sin, half, d);
    norm_backward(d_x, sums, g_first, x, weight, d, scale, mean, offset);
    norm_backward(d_x, sums, g_second, x, weight, half + d, scale, mean, offset);
  }
  for (int64_t d = 2 * half + begin; d < in.head_dim; d += kWarp * kPack) {
    A g_d[kPack];
    load(g_d, d_y + d);
    norm_backward(d_x, sums, g_d, x, weight, d, scale, mean, offset);
  }
}

// Shared memory holds the sums of d_q_norm and d_k_norm, [warps][2][head_dim]. Without norms it is empty.
template <class T, class A, int kPack>
__global__ void backward_kernel(QkNormRotaryInput<T, A> in, QkNormRotaryGradient<T, A> out) {
  BOUGH_DYNAMIC_SHARED(shared, 16);
  A* all_sums = reinterpret_cast<A*>(shared);
  const int64_t warps = blockDim.x / kWarp;
  const int64_t row = 2 * in.head_dim;
  A* sums = all_sums + threadIdx.x / kWarp * row;
  if (in.q_norm != nullptr) {
    for (int64_t d = threadIdx.x; d < warps * row; d += blockDim.x) all_sums[d] = 0;
    __syncthreads();
  }
  const int64_t half = in.num_pairs;
  const int64_t num_items = in.num_tokens * (in.num_heads + 2 * in.num_kv_heads);
  for (int64_t item = blockIdx.x * warps + threadIdx.x / kWarp; item < num_items; item += gridDim.x * warps) {
    const auto head = head_of(in, item);
    T* d_x = out.d_qkv + item * in.head_dim;
    if (head.kind == 2) {
      copy_head<T, kPack>(d_x, out.d_v + head.destination, in.head_dim);
      continue;
    }
    const T* d_y = (head.kind == 0 ? out.d_q : out.d_k) + head.destination;
    const A* cos = in.cos + head.token * half;
    const A* sin = in.sin + head.token * half;
    if (in.q_norm == nullptr) {
      unrotate_head<T, A, kPack>(d_x, d_y, cos, sin, half, in.head_dim);
    } else {
      norm_unrotate_head<T, A, kPack>(d_x, sums + head.kind * in.head_dim, d_y, in.qkv + item * in.head_dim,
                                      cos, sin, head.kind == 0 ? in.q_norm : in.k_norm, in);
    }
  }
  if (in.q_norm == nullptr) return;
  __syncthreads();
  for (int64_t d = threadIdx.x; d < row; d += blockDim.x) {
    A sum = 0;
    for (int64_t warp = 0; warp < warps; ++warp) sum += all_sums[warp * row + d];
    out.partial[blockIdx.x * row + d] = sum;
  }
}

template <class T, class A>
int64_t num_items(const QkNormRotaryInput<T, A>& in) {
  return in.num_tokens * (in.num_heads + 2 * in.num_kv_heads);
}
}  // namespace

// A part is the sum of one CUDA thread block. It has about 64 heads or more, because with fewer the second
// stage costs as much as the first. 1024 parts fill the largest devices.
int64_t qk_norm_rotary_num_parts(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads) {
  return std::clamp<int64_t>(divide_up(num_tokens * (num_heads + 2 * num_kv_heads), 64), 1, 1024);
}

int64_t qk_norm_rotary_max_head_dim(int64_t accumulator_bytes) {
  return kSharedBytes / (2 * accumulator_bytes);
}

template <class T, class A>
void qk_norm_rotary_forward_cuda(const QkNormRotaryInput<T, A>& in, T* q, T* k, T* v, CudaStream stream) {
  if (num_items(in) == 0) return;
  const bool packs =
      fits_packs(in.num_pairs, kPairPack, in.qkv, in.cos, in.sin, in.q_norm, in.k_norm, q, k, v);
  with_pack<kPairPack>(packs, [&](auto pack) {
    const int64_t blocks = std::min(divide_up(num_items(in), kWarps), kMaxBlocks);
    launch(forward_kernel<T, A, decltype(pack)::value>, static_cast<unsigned>(blocks), kWarps * kWarp, 0,
           stream, in, q, k, v);
  });
}

template <class T, class A>
void qk_norm_rotary_backward_cuda(const QkNormRotaryInput<T, A>& in, const QkNormRotaryGradient<T, A>& out,
                                  CudaStream stream) {
  if (num_items(in) == 0) return;
  const int64_t num_parts = qk_norm_rotary_num_parts(in.num_tokens, in.num_heads, in.num_kv_heads);
  const bool with_norm = in.q_norm != nullptr;
  const int64_t warp_bytes = with_norm ? 2 * in.head_dim * static_cast<int64_t>(sizeof(A)) : 0;
  const int64_t warps = with_norm ? std::clamp<int64_t>(kSharedBytes / warp_bytes, 1, kWarps) : kWarps;
  const bool packs = fits_packs(in.num_pairs, kPairPack, in.qkv, in.cos, in.sin, in.q_norm, in.k_norm,
                                out.d_q, out.d_k, out.d_v, out.d_qkv);
  with_pack<kPairPack>(packs, [&](auto pack) {
    launch(backward_kernel<T, A, decltype(pack)::value>, static_cast<unsigned>(num_parts),
           static_cast<unsigned>(warps * kWarp), warps * warp_bytes, stream, in, out);
  });
  if (!with_norm) return;
  add_parts(out.d_q_norm, out.partial, num_parts, in.head_dim, 2 * in.head_dim, stream);
  add_parts(out.d_k_norm, out.partial + in.head_dim, num_parts, in.head_dim, 2 * in.head_dim, stream);
}

#define INSTANTIATE(T, A)                                                                                  \
  template void qk_norm_rotary_forward_cuda<T, A>(const QkNormRotaryInput<T, A>&, T*, T*, T*, CudaStream); \
  template void qk_norm_rotary_backward_cuda<T, A>(const QkNormRotaryInput<T, A>&,                         \
                                                   const QkNormRotaryGradient<T, A>&, CudaStream);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough

// Selects the kernels of tree attention, and has the small kernel that computes D of each query.
#include "kernels/tree_attention/tree_attention_cuda.h"

#include "kernels/tree_attention/tree_attention_backward_cuda.cuh"
#include "kernels/tree_attention/tree_attention_plain_cuda.cuh"

namespace bough {

namespace {
constexpr int kRowWarps = 8;
// Wanted thread blocks for d_k and d_v: three for each multiprocessor of the largest GPUs.
constexpr int64_t kWantedKeyBlocks = 512;

// Returns the input with `spans` moved to the spans of this tile size.
template <class T>
TreeAttentionCuda<T> by_tiles(const TreeAttentionCuda<T>& in, int tile_size) {
  TreeAttentionCuda<T> tiled = in;
  tiled.spans += key_spans_begin(in.num_stack, in.num_tokens, tile_size);
  return tiled;
}

// Each warp computes D, the dot product of d_o and o, of one query and head.
template <class T>
__global__ void row_dots_kernel(const TreeAttentionCuda<T> in, const TreeAttentionCudaGradient<T> gradient) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / kWarp;
  if (row >= in.num_tokens * in.num_heads) return;
  float sum = 0;
  for (int64_t d = threadIdx.x % kWarp; d < in.head_dim; d += kWarp)
    sum += widen(gradient.d_o[row * in.head_dim + d]) * widen(gradient.o[row * in.head_dim + d]);
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp != 0) return;
  const int64_t out = row % in.num_heads * in.num_tokens + row / in.num_heads;
  gradient.dots[out] = sum;
  gradient.log2_sums[out] = gradient.lse[row] * kLog2E;
}

template <class T>
dim3 query_blocks(const TreeAttentionCuda<T>& in, int queries) {
  return {static_cast<unsigned>(in.num_heads), static_cast<unsigned>(divide_up(in.num_tokens, queries))};
}

template <class T>
dim3 key_blocks(const TreeAttentionCuda<T>& in, int keys) {
  return {static_cast<unsigned>(in.num_groups),
          static_cast<unsigned>(KeyTiles(in.num_stack, in.num_tokens, keys).count())};
}

// Calls `function` with the number of warps per thread block: 8 if every multiprocessor still gets two thread
// blocks, else 4. With 8 warps, keys and values are read half as often as with 4. The results are the same.
template <class Function>
void with_warps(const TreeAttentionCuda<BFloat16Bits>& in, Function&& function) {
  int device = 0, multiprocessors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (in.num_heads * divide_up(in.num_tokens, 8 * kFragmentRows) >= 2 * multiprocessors)
    function(std::integral_constant<int, 8>());
  else function(std::integral_constant<int, 4>());
}

// The tensor-core kernels read packs of 16 bytes.
bool suits_tensor_cores(const TreeAttentionCuda<BFloat16Bits>& in) {
  return in.tensor_cores && in.head_dim <= kTreeAttentionMaxHeadDim &&
         fits_packs(in.head_dim, 8, in.q, in.k, in.v, in.k_stack, in.v_stack);
}

template <int kHead>
void tensor_forward(const TreeAttentionCuda<BFloat16Bits>& in, BFloat16Bits* o, float* lse,
                    CudaStream stream) {
  with_warps(in, [&](auto num_warps) {
    constexpr int kWarps = decltype(num_warps)::value;
    launch(tree_attention_forward_kernel<kHead, kWarps>, query_blocks(in, QueryBlock<kWarps>::kQueries),
           kWarps * kWarp, KeyStages<kHead, kWarps * kWarp>::kBytes, stream, in, o, lse);
  });
}

template <int kHead>
void tensor_backward(const TreeAttentionCuda<BFloat16Bits>& in,
                     const TreeAttentionCudaGradient<BFloat16Bits>& gradient, CudaStream stream) {
  const int64_t num_parts =
      tree_attention_num_parts<BFloat16Bits>(in.num_stack, in.num_tokens, in.num_heads, in.num_groups);
  dim3 blocks = key_blocks(in, kTensorTile);
  blocks.z = static_cast<unsigned>(num_parts);
  const auto sum = [&](auto* kernel) {
    launch(kernel, blocks, kGradientThreads, QueryStages<kHead>::kBytes, stream, in, gradient);
  };
  if constexpr (kHead > 128) {
    sum(tree_attention_key_gradient_kernel<kHead, KeySums::kKeys>);
    sum(tree_attention_key_gradient_kernel<kHead, KeySums::kValues>);
  } else {
    sum(tree_attention_key_gradient_kernel<kHead, KeySums::kBoth>);
  }
  if (num_parts > 1) {
    const int64_t packs = (in.num_stack + in.num_tokens) * in.num_groups * in.head_dim / 4;
    launch(add_key_gradient_parts_kernel, dim3(static_cast<unsigned>(divide_up(packs, kGradientThreads)), 2),
           kGradientThreads, 0, stream, in, gradient, num_parts);
  }
  using Queries = QueryGradient<kHead>;
  launch(tree_attention_query_gradient_kernel<kHead>, query_blocks(in, Queries::Block::kQueries),
         Queries::kThreads, Queries::kBytes, stream, in, gradient);
}

// Calls `function` with the width of the tensor-core kernels for the head.
template <class Function>
void with_head(int64_t head_dim, Function&& function) {
  if (head_dim <= 64) return function(std::integral_constant<int, 64>());
  if (head_dim <= 128) return function(std::integral_constant<int, 128>());
  function(std::integral_constant<int, 256>());
}

template <int kHead>
constexpr int kTensorBytes = std::max({KeyStages<kHead, kGradientThreads>::kBytes, QueryStages<kHead>::kBytes,
                                       QueryGradient<kHead>::kBytes});
static_assert(kTensorBytes<256> <= 99 << 10);  // of compute capability 8.6 and 8.9

template <class T, int kMaxHead>
void plain_forward(const TreeAttentionCuda<T>& in, T* o, float* lse, CudaStream stream) {
  launch(plain_forward_kernel<T, kMaxHead>, query_blocks(in, kPlainTile), kPlainThreads,
         PlainTiles(in.head_dim).bytes(3, 1), stream, in, o, lse);
}

template <class T, int kMaxHead>
void plain_backward(const TreeAttentionCuda<T>& in, const TreeAttentionCudaGradient<T>& gradient,
                    CudaStream stream) {
  const PlainTiles tiles(in.head_dim);
  launch(plain_key_gradient_kernel<T, kMaxHead>, key_blocks(in, kPlainTile), kPlainThreads, tiles.bytes(4, 2),
         stream, in, gradient);
  launch(plain_query_gradient_kernel<T, kMaxHead>, query_blocks(in, kPlainTile), kPlainThreads,
         tiles.bytes(4, 1), stream, in, gradient);
}
}  // namespace

int64_t tree_attention_shared_bytes(int64_t head_dim, bool tensor_cores) {
  if (!tensor_cores || head_dim % 8 != 0) return PlainTiles(head_dim).bytes(4, 2);
  int64_t bytes = 0;
  with_head(head_dim, [&](auto head) { bytes = kTensorBytes<decltype(head)::value>; });
  return bytes;
}

template <class T>
int64_t tree_attention_num_parts(int64_t num_stack, int64_t num_tokens, int64_t num_heads,
                                 int64_t num_groups) {
  if (!std::is_same_v<T, BFloat16Bits>) return 1;
  const int64_t blocks = std::max(1, KeyTiles(num_stack, num_tokens, kTensorTile).count()) * num_groups;
  return std::clamp<int64_t>(divide_up(kWantedKeyBlocks, blocks), 1, num_heads / num_groups);
}

template <class T>
void tree_attention_forward_cuda(const TreeAttentionCuda<T>& in, T* o, float* lse, CudaStream stream) {
  if (in.num_tokens * in.num_heads == 0) return;
  if constexpr (std::is_same_v<T, BFloat16Bits>)
    if (suits_tensor_cores(in) && fits_packs(8, 8, o)) {
      const auto tiled = by_tiles(in, kTensorTile);
      return with_head(in.head_dim,
                       [&](auto head) { tensor_forward<decltype(head)::value>(tiled, o, lse, stream); });
    }
  const auto tiled = by_tiles(in, kPlainTile);
  in.head_dim <= 128 ? plain_forward<T, 128>(tiled, o, lse, stream)
                     : plain_forward<T, 256>(tiled, o, lse, stream);
}

template <class T>
void tree_attention_backward_cuda(const TreeAttentionCuda<T>& in,
                                  const TreeAttentionCudaGradient<T>& gradient, CudaStream stream) {
  if (in.num_tokens * in.num_heads == 0) return;
  const auto rows = static_cast<unsigned>(divide_up(in.num_tokens * in.num_heads, kRowWarps));
  launch(row_dots_kernel<T>, dim3(rows), kRowWarps * kWarp, 0, stream, in, gradient);
  if constexpr (std::is_same_v<T, BFloat16Bits>)
    if (suits_tensor_cores(in) && fits_packs(8, 8, gradient.d_o, gradient.d_q, gradient.d_k, gradient.d_v,
                                             gradient.d_k_stack, gradient.d_v_stack)) {
      const auto tiled = by_tiles(in, kTensorTile);
      return with_head(in.head_dim,
                       [&](auto head) { tensor_backward<decltype(head)::value>(tiled, gradient, stream); });
    }
  const auto tiled = by_tiles(in, kPlainTile);
  in.head_dim <= 128 ? plain_backward<T, 128>(tiled, gradient, stream)
                     : plain_backward<T, 256>(tiled, gradient, stream);
}

// NOLINTBEGIN(bugprone-macro-parentheses): T is a type.
#define INSTANTIATE(T)                                                                               \
  template int64_t tree_attention_num_parts<T>(int64_t, int64_t, int64_t, int64_t);                  \
  template void tree_attention_forward_cuda<T>(const TreeAttentionCuda<T>&, T*, float*, CudaStream); \
  template void tree_attention_backward_cuda<T>(const TreeAttentionCuda<T>&,                         \
                                                const TreeAttentionCudaGradient<T>&, CudaStream);
// NOLINTEND(bugprone-macro-parentheses)
INSTANTIATE(float)
INSTANTIATE(BFloat16Bits)

}  // namespace bough

// Selects the kernels of paged attention, and has three kernels without tensor cores: storing keys and
// values, attention in fp32, merging parts.
#include "kernels/paged_attention/paged_attention_cuda.h"

#include "kernels/paged_attention/paged_attention_tensor_cuda.cuh"

namespace bough {

namespace {

template <class T, int kPack>
__global__ void store_tokens_kernel(const PagedAttentionCuda<T> in) {
  const int64_t packs = in.head_dim / kPack;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = index / packs, column = index % packs * kPack;  // row: token · G + g
  if (row >= in.num_tokens * in.num_groups) return;
  const int slot = PagedWorkView(in.work, in.layout).slots[row / in.num_groups];
  if (slot < 0) return;
  const int64_t page = slot / kPagedPageTokens * in.num_groups + row % in.num_groups;
  const int64_t to = (page * kPagedPageTokens + slot % kPagedPageTokens) * in.head_dim + column;
  const int64_t from = row * in.head_dim + column;
  using P = Pack<T, kPack>;
  *reinterpret_cast<P*>(in.keys + to) = *reinterpret_cast<const P*>(in.k + from);
  *reinterpret_cast<P*>(in.values + to) = *reinterpret_cast<const P*>(in.v + from);
}

// Each warp computes one entry (query token and head). Lanes are keys for scores, and dimensions for sums.
template <class T, int kPack>
__global__ void __launch_bounds__(kPagedThreads)
    paged_attention_plain_kernel(const PagedAttentionCuda<T> in, bool large) {
  constexpr int kColumns = static_cast<int>(kPagedAttentionMaxHeadDim) / kWarp;
  const PagedWorkView work(in.work, in.layout);
  const int index = static_cast<int>(blockIdx.x);
  if (index >= (large ? work.header->num_large : work.header->num_small)) return;
  const PagedItem item = (large ? work.large : work.small)[index];
  const int group = item.group < 0 ? static_cast<int>(blockIdx.y) : item.group;
  const int heads = static_cast<int>(in.num_heads / in.num_groups), head_dim = static_cast<int>(in.head_dim);
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  const int32_t* pages = work.pages + item.page_begin;
  float* const q = reinterpret_cast<float*>(dynamic_shared_memory()) + warp * kPagedAttentionMaxHeadDim;
  const float scale = in.scale * kLog2E;
  for (int e = warp; e < item.num_rows * heads; e += kPagedWarps) {
    const PagedEntry entry(item, work.rows, e, group, heads);
    const T* from = in.q + (static_cast<int64_t>(entry.token) * in.num_heads + entry.head) * head_dim;
    __syncwarp();  // all lanes have read the previous entry's q
    for (int d = lane; d < head_dim; d += kWarp) q[d] = widen(from[d]) * scale;
    __syncwarp();
    float sums[kColumns] = {}, row_max = -INFINITY, row_sum = 0;
    const int end = min(item.key_end, entry.limit);
    for (int first = item.first_key; first < end; first += kWarp) {
      const int key = first + lane;
      int64_t offset = 0;  // offset of this lane's key
      float score = -INFINITY;
      if (key < end) {
        const int64_t page =
            static_cast<int64_t>(pages[(key - item.first_key) / kPagedPageTokens]) * in.num_groups + group;
        offset = (page * kPagedPageTokens + key % kPagedPageTokens) * head_dim;
        score = 0;
        for (int d = 0; d < head_dim; d += kPack) {
          float x[kPack];
          load<float, T, kPack>(x, in.keys + offset + d);
#pragma unroll
          for (int i = 0; i < kPack; ++i) score += q[d + i] * x[i];
        }
      }
      float largest = score;
#pragma unroll
      for (int mask = kWarp / 2; mask > 0; mask /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, mask));
      largest = fmaxf(largest, row_max);
      const float rescale = exp2_approximate(row_max - largest), weight = exp2_approximate(score - largest);
      row_max = largest;
      row_sum = row_sum * rescale + warp_sum(weight);
#pragma unroll
      for (float& sum : sums) sum *= rescale;
      const int count = min(kWarp, end - first);
      for (int j = 0; j < count; ++j) {
        const float w = __shfl_sync(kAllLanes, weight, j);
        const T* v = in.values + __shfl_sync(kAllLanes, offset, j);
#pragma unroll
        for (int i = 0; i < kColumns; ++i)
          if (lane + i * kWarp < head_dim) sums[i] += w * widen(v[lane + i * kWarp]);
      }
    }
    const PagedOutput<T> out(in, entry);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int d = lane + i * kWarp;
      if (d >= head_dim) break;
      if (out.part) out.part[d] = sums[i];
      else round_to(out.o + d, sums[i] / row_sum);
    }
    if (out.part && lane == 0) *reinterpret_cast<float2*>(out.part_sums) = {row_max, row_sum};
  }
}

// Each warp merges the parts of one query token and head in the order of their keys. At least one part has a
// visible key.
template <class T>
__global__ void __launch_bounds__(kPagedThreads) merge_parts_kernel(const PagedAttentionCuda<T> in) {
  constexpr int kColumns = static_cast<int>(kPagedAttentionMaxHeadDim) / kWarp;
  const PagedWorkView work(in.work, in.layout);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kPagedWarps + threadIdx.x / kWarp;
  if (index >= work.header->num_merges * in.num_heads) return;
  const int lane = static_cast<int>(threadIdx.x % kWarp), head_dim = static_cast<int>(in.head_dim);
  const PagedMerge merge = work.merges[index / in.num_heads];
  const int64_t head = index % in.num_heads;
  if (merge.group >= 0 && head / (in.num_heads / in.num_groups) != merge.group) return;
  const auto state = [&](int part) {
    return reinterpret_cast<const float2*>(in.part_sums)[part * in.num_heads + head];
  };
  float largest = -INFINITY;
  for (int part = merge.part_begin; part < merge.part_end; ++part) largest = fmaxf(largest, state(part).x);
  float sums[kColumns] = {}, sum = 0;
  for (int part = merge.part_begin; part < merge.part_end; ++part) {
    const float weight = exp2_approximate(state(part).x - largest);
    sum += weight * state(part).y;
    const float* from = in.parts + (part * in.num_heads + head) * head_dim;
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
      if (lane + i * kWarp < head_dim) sums[i] += weight * from[lane + i * kWarp];
  }
  T* to = in.o + (merge.token * in.num_heads + head) * head_dim;
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (lane + i * kWarp < head_dim) round_to(to + lane + i * kWarp, sums[i] / sum);
}

template <int kHead, bool kLarge>
void tensor_attention(const PagedAttentionCuda<BFloat16Bits>& in, dim3 blocks, CudaStream stream) {
  launch(paged_attention_kernel<kHead, kLarge>, blocks, kPagedThreads, PageStages<kHead>::kBytes, stream, in);
}

template <class T>
void attend(const PagedAttentionCuda<T>& in, bool large, CudaStream stream) {
  const int64_t num_items = large ? in.layout.max_large : in.layout.max_small;
  if (num_items == 0) return;
  const dim3 blocks(static_cast<unsigned>(num_items),
                    in.layout.per_head ? 1u : static_cast<unsigned>(in.num_groups));
  if constexpr (std::is_same_v<T, BFloat16Bits>) {
    const bool fits = in.tensor_cores && in.num_heads / in.num_groups <= kPagedLargeEntries &&
                      in.head_dim <= kPagedAttentionMaxHeadDim &&
                      fits_packs(in.head_dim, 8, in.q, in.keys, in.values, in.o);
    if (fits && in.head_dim <= 64)
      return large ? tensor_attention<64, true>(in, blocks, stream)
                   : tensor_attention<64, false>(in, blocks, stream);
    if (fits && in.head_dim <= 128)
      return large ? tensor_attention<128, true>(in, blocks, stream)
                   : tensor_attention<128, false>(in, blocks, stream);
    if (fits)
      return large ? tensor_attention<256, true>(in, blocks, stream)
                   : tensor_attention<256, false>(in, blocks, stream);
  }
  constexpr int kBytes = kPagedWarps * static_cast<int>(kPagedAttentionMaxHeadDim * sizeof(float));
  with_pack<kFullPack<T>>(fits_packs(in.head_dim, kFullPack<T>, in.keys), [&](auto pack) {
    launch(paged_attention_plain_kernel<T, decltype(pack)::value>, blocks, kPagedThreads, kBytes, stream, in,
           large);
  });
}

}  // namespace

template <class T>
void paged_attention_cuda(const PagedAttentionCuda<T>& in, CudaStream stream) {
  if (in.num_tokens == 0) return;
  with_pack<kFullPack<T>>(
      fits_packs(in.head_dim, kFullPack<T>, in.k, in.v, in.keys, in.values), [&](auto pack) {
        constexpr int kPack = decltype(pack)::value;
        const int64_t threads = in.num_tokens * in.num_groups * in.head_dim / kPack;
        launch(store_tokens_kernel<T, kPack>, dim3(static_cast<unsigned>(divide_up(threads, kPagedThreads))),
               kPagedThreads, 0, stream, in);
      });
  attend(in, true, stream);
  attend(in, false, stream);
  if (in.layout.max_merges > 0)
    launch(merge_parts_kernel<T>,
           dim3(static_cast<unsigned>(divide_up(in.layout.max_merges * in.num_heads, kPagedWarps))),
           kPagedThreads, 0, stream, in);
}

template void paged_attention_cuda<float>(const PagedAttentionCuda<float>&, CudaStream);
template void paged_attention_cuda<BFloat16Bits>(const PagedAttentionCuda<BFloat16Bits>&, CudaStream);

}  // namespace bough

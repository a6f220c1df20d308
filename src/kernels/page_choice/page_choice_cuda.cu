#include "kernels/page_choice/page_choice_cuda.h"

#include "kernels/common/cuda_kernel.cuh"

namespace bough {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp, kPageTokens = 16, kBins = 256;
constexpr unsigned kAll = 0xFFFFFFFFu;

template <class T>
__global__ void __launch_bounds__(kThreads) summarise_kernel(const SummarisePagesCuda<T> in) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= in.num_complete * in.num_groups * in.padded_dim) return;
  const int64_t h = index % in.padded_dim, row = index / in.padded_dim, g = row % in.num_groups;
  const int64_t head = static_cast<int64_t>(in.complete[row / in.num_groups]) * in.num_groups + g;
  float total = 0, least = h < in.head_dim ? INFINITY : 0, most = -least;
  for (int j = 0; h < in.head_dim && j < kPageTokens; ++j) {
    const float x = widen(in.keys[(head * kPageTokens + j) * in.head_dim + h]);
    total += x;
    least = x < least ? x : least;
    most = x > most ? x : most;
  }
  T* const to = in.summaries + head * (in.has_extremes ? 2 : 1) * in.padded_dim + h;
  if (!in.has_extremes) {
    round_to(to, total / kPageTokens);
  } else {
    round_to(to, least);
    round_to(to + in.padded_dim, most);
  }
}

// Maps scores to unsigned integers of the same order. Scores are never NaN: choose_kernel stores a NaN as
// -infinity.
__device__ inline unsigned ordered(float score) {
  const unsigned bits = __float_as_uint(score + 0.0f);  // maps both zeros to the same bits
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Returns how many threads before this one have `flag` set, and sets `total` to how many of the thread block
// have. All threads of the block must call it.
__device__ inline int count_before(bool flag, int* counts, int& total) {
  const unsigned votes = __ballot_sync(kAll, flag);
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = static_cast<int>(threadIdx.x % kWarp);
  __syncthreads();  // all threads have read the previous counts
  if (lane == 0) counts[warp] = __popc(votes);
  __syncthreads();
  int before = __popc(votes & ((1u << lane) - 1));
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += counts[w];
    total += counts[w];
  }
  return before;
}

template <class T>
__global__ void __launch_bounds__(kThreads) choose_kernel(const ChoosePagesCuda<T> in) {
  __shared__ float q_mean[kPageChoiceMaxHeadDim];
  __shared__ unsigned bins[kBins];
  __shared__ unsigned threshold, remaining;
  __shared__ int counts[kWarps];
  const int64_t g = blockIdx.x % in.num_groups, heads = in.num_heads / in.num_groups;
  const PageChoiceQuery query = in.queries[blockIdx.x / in.num_groups];
  const int tid = static_cast<int>(threadIdx.x), warp = tid / kWarp, lane = tid % kWarp;
  for (int64_t h = tid; h < in.padded_dim; h += kThreads) {
    float sum = 0;
    for (int64_t n = g * heads; h < in.head_dim && n < (g + 1) * heads; ++n)
      sum += widen(in.q[(query.token * in.num_heads + n) * in.head_dim + h]);
    q_mean[h] = sum / static_cast<float>(heads);
  }
  __syncthreads();

  const int candidates = query.num_pages - 3, kept = query.kept;
  const int32_t* const pages = in.pages + query.first_page + 1;
  float* const scores = in.scores + static_cast<int64_t>(blockIdx.x) * in.most_pages;
  for (int i = warp; i < candidates; i += kWarps) {
    const T* const summary = in.summaries + (static_cast<int64_t>(pages[i]) * in.num_groups + g) *
                                                (in.has_extremes ? 2 : 1) * in.padded_dim;
    float score = 0;
    for (int64_t h = lane; h < in.padded_dim; h += kWarp) {
      float product = q_mean[h] * widen(summary[h]);
      if (in.has_extremes) product = fmaxf(product, q_mean[h] * widen(summary[in.padded_dim + h]));
      score += product;
    }
    score = warp_sum(score);
    if (lane == 0) scores[i] = score == score ? score : -INFINITY;
  }
  __syncthreads();

  // A radix search, eight bits at a time, for the bits of the lowest score that is kept. `remaining` becomes
  // the number of scores to keep that equal this score.
  unsigned mask = 0;
  if (tid == 0) {
    threshold = 0;
    remaining = static_cast<unsigned>(kept);
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    bins[tid] = 0;
    __syncthreads();
    for (int i = tid; i < candidates; i += kThreads) {
      const unsigned bits = ordered(scores[i]);
      if ((bits & mask) == threshold) atomicAdd(&bins[bits >> shift & 255u], 1u);
    }
    __syncthreads();
    if (tid == 0) {
      int digit = kBins - 1;
      while (digit > 0 && bins[digit] < remaining) remaining -= bins[digit--];
      threshold |= static_cast<unsigned>(digit) << shift;
    }
    mask |= 255u << shift;
    __syncthreads();
  }

  int32_t* const list = in.lists + static_cast<int64_t>(blockIdx.x) * in.most_kept;
  int32_t* const table = in.ids == nullptr ? nullptr : in.ids + in.tables[blockIdx.x];
  if (table != nullptr && tid == 0) {
    table[0] = pages[-1];
    table[kept + 1] = pages[candidates];
    table[kept + 2] = pages[candidates + 1];
  }
  int num_equal = 0, num_listed = 0;
  for (int begin = 0; begin < candidates; begin += kThreads) {
    const int i = begin + tid;
    const unsigned bits = i < candidates ? ordered(scores[i]) : 0;
    int total = 0;
    const bool is_equal = i < candidates && bits == threshold;
    const int rank = num_equal + count_before(is_equal, counts, total);
    num_equal += total;
    const bool is_kept =
        i < candidates && (bits > threshold || (is_equal && rank < static_cast<int>(remaining)));
    const int place = num_listed + count_before(is_kept, counts, total);
    num_listed += total;
    if (is_kept) list[place] = i + 1;
    if (is_kept && table != nullptr) table[place + 1] = pages[i];
  }
}

}  // namespace

template <class T>
void summarise_pages_cuda(const SummarisePagesCuda<T>& in, CudaStream stream) {
  const int64_t elements = in.num_complete * in.num_groups * in.padded_dim;
  if (elements == 0) return;
  launch(summarise_kernel<T>, static_cast<unsigned>(divide_up(elements, kThreads)), kThreads, 0, stream, in);
}

template <class T>
void choose_pages_cuda(const ChoosePagesCuda<T>& in, CudaStream stream) {
  static_assert(kThreads == kBins);
  if (in.num_queries == 0) return;
  launch(choose_kernel<T>, static_cast<unsigned>(in.num_queries * in.num_groups), kThreads, 0, stream, in);
}

#define INSTANTIATE(T)                                                             \
  template void summarise_pages_cuda<T>(const SummarisePagesCuda<T>&, CudaStream); \
  template void choose_pages_cuda<T>(const ChoosePagesCuda<T>&, CudaStream);
INSTANTIATE(float)
INSTANTIATE(BFloat16Bits)

}  // namespace bough

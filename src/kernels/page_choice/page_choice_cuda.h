// CUDA launchers of page_choice.h. Pointers are of the device; launch errors are left to cudaGetLastError.
// T: BFloat16Bits or float; scores are fp32.
//
// A thread makes an element of a summary, from the page's keys in their order: the bits of the CPU. A block
// has a query and key/value head: its warps score a page each, then the highest scores are found by their
// bits, eight at a time, and of those that equal the least of them the lower pages are taken. Scores are
// summed in another order than on the CPU. No atomics but counts of whole numbers.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

constexpr int64_t kPageChoiceMaxHeadDim = 256;

template <class T>
struct SummarisePagesCuda {
  T* summaries;             // [pages, G, 1 or 2, padded H]
  const T* keys;            // [pages, G, 16, H]
  const int32_t* complete;  // [num_complete]
  int64_t num_complete, num_groups, head_dim, padded_dim;
  bool has_extremes;
};

template <class T>
void summarise_pages_cuda(const SummarisePagesCuda<T>& in, CudaStream stream);

struct PageChoiceQuery {
  int32_t token, first_page, num_pages, kept;  // its pages' place in `pages`; kept: beside those always kept
};

template <class T>
struct ChoosePagesCuda {
  int32_t* lists;        // [queries, G, most_kept]: indices into the query's pages, ascending
  float* scores;         // scratch [queries, G, most_pages]
  const T* q;            // [T, N, H]
  const T* summaries;    // [pages, G, 1 or 2, padded H]
  const int32_t* pages;  // of all queries
  const PageChoiceQuery* queries;
  int64_t num_queries, num_heads, num_groups, head_dim, padded_dim, most_pages, most_kept;
  bool has_extremes;
};

template <class T>
void choose_pages_cuda(const ChoosePagesCuda<T>& in, CudaStream stream);

}  // namespace bough

// Launchers of the CUDA kernels of page_choice.h (cuda_launch.h). T is BFloat16Bits or float.
// Scores are fp32.
//
// One thread computes one element of a summary from the page's keys in order, with the same bits as on the
// CPU. One CUDA thread block chooses the pages of one query and key/value head. Each of its warps scores one
// page at a time. A radix search, eight bits at a time, finds the lowest score that is kept. If too many
// pages have it, the first ones are kept. Scores are summed in another order than on the CPU. Atomics count
// integers only.
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
  int32_t token, first_page, num_pages, kept;  // first_page: index into `pages`; kept: pages chosen by score
};

template <class T>
struct ChoosePagesCuda {
  int32_t* lists;        // [queries, G, most_kept]: indices into the query's pages, ascending
  float* scores;         // scratch [queries, G, most_pages]
  const T* q;            // [T, N, H]
  const T* summaries;    // [pages, G, 1 or 2, padded H]
  const int32_t* pages;  // page ids of all queries
  const PageChoiceQuery* queries;
  // nullptr, or: query i's table for group g begins at ids[tables[i · G + g]], and gets the ids of all pages
  // that it keeps.
  const int32_t* tables;
  int32_t* ids;
  int64_t num_queries, num_heads, num_groups, head_dim, padded_dim, most_pages, most_kept;
  bool has_extremes;
};

template <class T>
void choose_pages_cuda(const ChoosePagesCuda<T>& in, CudaStream stream);

}  // namespace bough

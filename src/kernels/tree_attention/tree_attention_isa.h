#pragma once

#include <cstdint>

#include "kernels/common/isa.h"

namespace bough {

// Which entries of a tile of scores are visible: entry (query i, key j) iff first_key + j <= first_query + i
// (keys numbered like the queries: stack keys are negative) and first_query + i < end_local[j].
struct TileMask {
  int64_t first_query;
  int64_t first_key;
  const int32_t* end_local;  // of the tile's keys
  bool all_visible;
};

}  // namespace bough

// Tiles are padded to `padded_*`, row-major with that row length; entries beyond the real rows and keys become 0.

// dst[num_rows (zero rows up to padded)][width] = src rows of stride `stride`.
BOUGH_ISA_DECLARE(template <class T> void load_tile(float* dst, const T* src, int64_t num_rows,
                                                    int64_t padded_rows, int64_t width, int64_t stride))
// dst[width][padded_rows] = the transpose of that.
BOUGH_ISA_DECLARE(template <class T> void load_tile_transposed(float* dst, const T* src, int64_t num_rows,
                                                               int64_t padded_rows, int64_t width,
                                                               int64_t stride))
BOUGH_ISA_DECLARE(void transpose_tile(float* dst, const float* src, int64_t rows, int64_t columns))
// One step of the online softmax of scores[queries][padded_keys] · scale: unnormalised probabilities (which may
// overwrite the scores), row_max and row_sum are updated, o[queries][width] is rescaled. Rows of probabilities beyond
// num_queries are left as they are: their products are never read.
BOUGH_ISA_DECLARE(void online_softmax_tile(float* scores, float* probabilities, int64_t num_queries,
                                           int64_t num_keys, int64_t padded_keys, const TileMask& mask,
                                           float scale, float* row_max, float* row_sum, float* o,
                                           int64_t width))
// o[queries][0..head_dim) of rows of o_stride, / row_sum -> rows of out; lse = row_max + log(row_sum).
BOUGH_ISA_DECLARE(template <class T> void finish_tile(T* out, int64_t out_stride, const float* o,
                                                      int64_t o_stride, const float* row_sum,
                                                      int64_t num_queries, int64_t head_dim))
// sums[i] = d_o[i] . o[i]
BOUGH_ISA_DECLARE(template <class T> void row_dots(float* sums, const T* d_o, const T* o, int64_t num_rows,
                                                   int64_t width, int64_t stride))
// Transposed tiles [keys][padded_queries]: probabilities p (which may overwrite the scores) and dS, of scores · scale
// and of the gradients of p. lse, dots: of the tile's queries.
BOUGH_ISA_DECLARE(void softmax_backward_tile(const float* scores, const float* d_probabilities,
                                             float* probabilities, float* d_s, int64_t num_queries,
                                             int64_t padded_queries, int64_t num_keys, int64_t padded_keys,
                                             const TileMask& mask, const float* lse, const float* dots,
                                             float scale))

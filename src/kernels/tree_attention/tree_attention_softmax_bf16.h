// Softmax of units of bf16 attention: 32 queries times 32 keys of one head. Scores are products q·k; `scale`
// here is the attention's scale times log2(e), and exponents are base 2.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"
#include "kernels/tree_attention/unit_mask.h"

namespace bough::bf16 {

// Elements from one unit of scores to the next: a line more than a unit, since addresses 4 KiB apart share a
// set of the nearest cache.
constexpr int64_t kScoreStride = kUnitElements + kLanes;

// Running softmax of 32 queries of one head, over all keys so far.
struct OnlineSoftmax {
  float* max;     // [32], scaled: a score, at most kSlack below the largest
  float* sums;    // [32]
  float* o;       // [width][32], unnormalised
  int64_t width;  // a multiple of 16
};
constexpr int kSlack =
    32;  // in powers of two: fp32 and bf16 have range to spare, and maxima are searched for once

// Raises max to the largest score so far; scores are [count][2][32 keys][16 queries], units kScoreStride
// apart. sums and o are rescaled, or begun at the first step (o is not read then).
void raise_maxima(float* scores, const UnitMask* masks, int64_t count, float scale, bool first_step,
                  const OnlineSoftmax& rows);
// Turns scores into unnormalised probabilities in their place: those of keys 2j and 2j + 1 in row 2j as pairs
// of bf16 (a right factor of which every second line is skipped), and added to sums. False where a score lay
// kSlack above its query's max: then sums are as they were, and scores must be computed again and maxima
// raised first.
bool softmax_units(float* scores, const UnitMask* masks, int64_t count, float scale,
                   const OnlineSoftmax& rows);
// Stores o / sum to `num_rows` rows of out, of head_dim; lse (of stride lse_stride) in natural units.
void finish_softmax(const OnlineSoftmax& rows, int64_t num_rows, BFloat16Bits* out, int64_t out_stride,
                    int64_t head_dim, float* lse, int64_t lse_stride);

// sums[r] = a[r]·b[r]: rows of head_dim, `stride` apart.
void row_dots(float* sums, const BFloat16Bits* a, const BFloat16Bits* b, int64_t num_rows, int64_t stride,
              int64_t head_dim);
// Backward of one transposed unit: scores[32 keys][32 queries] and the gradients of the probabilities in the
// same order become
//   p = 2^(scale · score - lse), dS = p (d_p - dot)
// p, d_s: [32 keys][32 queries]; d_s_right: dS as a right factor, keys in depth (matrix_product_tiles.h). lse
// (base 2), dots: of the 32 queries.
void softmax_backward_unit(const float* scores, const float* d_p, const UnitMask& mask, float scale,
                           const float* lse, const float* dots, BFloat16Bits* p, BFloat16Bits* d_s,
                           BFloat16Bits* d_s_right);

// Stores sums [width][32 queries], each query times its factor, to rows of out, of head_dim.
void store_turned(const float* sums, const float* factors, int64_t num_rows, BFloat16Bits* out,
                  int64_t out_stride, int64_t head_dim);
// Adds sums [width][32 queries] to a row for each query: rows[i][h] += sums[h][i]. width: a multiple of 16.
void add_turned(const float* sums, float* const* rows, int64_t num_rows, int64_t width);

}  // namespace bough::bf16

// Softmax of bf16 attention units: 32 queries by 32 keys of one head. Scores are q·k, not scaled. Exponents
// are base 2: `scale` is the attention's scale times log2(e).
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"
#include "kernels/tree_attention/unit_mask.h"

namespace bough::bf16 {

// Elements from one unit of scores to the next: a unit and one cache line. If units were 4 KiB apart, they
// would map to the same set of the L1 cache.
constexpr int64_t kScoreStride = kUnitElements + kLanes;

// The running softmax of 32 queries of one head, for all keys processed so far.
struct OnlineSoftmax {
  float* max;     // [32]; the largest scaled score, or at most kSlack below it
  float* sums;    // [32]
  float* o;       // [width][32], unnormalised
  int64_t width;  // a multiple of 16
};
constexpr int kSlack =
    32;  // in powers of two: fp32 and bf16 have the range, and maxima are rarely searched again

// Raises max to the largest visible scaled score so far, and rescales sums and o. If first_step, the old
// values are not read: sets max to the largest of these scores and sums to 0, and does not touch o. scores:
// [count][2][32 keys][16 queries], units kScoreStride apart. Invisible scores are set to -infinity.
void raise_maxima(float* scores, const UnitMask* masks, int64_t count, float scale, bool first_step,
                  const OnlineSoftmax& rows);
// Replaces scores by unnormalised probabilities in place, and adds the probabilities to sums. The result is a
// right factor (matrix_product_tiles.h): matrix row 2j has the probabilities of keys 2j and 2j + 1 as pairs
// of bf16, row 2j + 1 is unused. Returns false if a scaled score was more than kSlack above its query's max.
// Then sums are unchanged, but the scores are lost: the caller must compute them again, call raise_maxima,
// and repeat the call.
bool softmax_units(float* scores, const UnitMask* masks, int64_t count, float scale,
                   const OnlineSoftmax& rows);
// Stores o / sum of the first `num_rows` queries to rows of `out` with head_dim elements, and their
// log-sum-exp (natural logarithm) to lse with stride lse_stride.
void finish_softmax(const OnlineSoftmax& rows, int64_t num_rows, BFloat16Bits* out, int64_t out_stride,
                    int64_t head_dim, float* lse, int64_t lse_stride);

// sums[r] = a[r]·b[r] for matrix rows of head_dim elements, `stride` apart.
void row_dots(float* sums, const BFloat16Bits* a, const BFloat16Bits* b, int64_t num_rows, int64_t stride,
              int64_t head_dim);
// Backward of one unit. scores and the gradients d_p of the probabilities are [32 keys][32 queries].
//   p = 2^(scale · score - lse), dS = p (d_p - dot)
// p, d_s: outputs [32 keys][32 queries]. d_s_right: output, dS as a right factor whose inner dimension is the
// keys (matrix_product_tiles.h). lse (base 2), dots (D): one for each of the 32 queries.
void softmax_backward_unit(const float* scores, const float* d_p, const UnitMask& mask, float scale,
                           const float* lse, const float* dots, BFloat16Bits* p, BFloat16Bits* d_s,
                           BFloat16Bits* d_s_right);

// Transposes sums [width][32 queries], multiplies query i by factors[i], and stores the first `num_rows`
// queries to rows of `out` with head_dim elements.
void store_turned(const float* sums, const float* factors, int64_t num_rows, BFloat16Bits* out,
                  int64_t out_stride, int64_t head_dim);
// Backward of 32 queries and the 16 keys of a page, as softmax_backward_unit() with other layouts. scores and
// d_p: [32 queries][16 keys]. Query i sees key j if bit j of visible[i] is set.
// d_s: output, the first 16 columns of a left factor [32 queries][32]; the caller sets the others to 0.
// p_turned, d_s_turned: outputs, left factors [16 keys][32 queries].
void softmax_backward_page(const float* scores, const float* d_p, const uint16_t* visible, float scale,
                           const float* lse, const float* dots, BFloat16Bits* d_s, BFloat16Bits* p_turned,
                           BFloat16Bits* d_s_turned);
// Adds matrix rows of width elements to separate vectors: rows[i][h] += sums[i][h]. width: a multiple of 16.
void add_rows(const float* sums, float* const* rows, int64_t num_rows, int64_t width);
// out[h] = factor · sums[h] for h < head_dim, rounded to nearest even. Reads sums up to a multiple of 16.
void store_row(const float* sums, float factor, BFloat16Bits* out, int64_t head_dim);

}  // namespace bough::bf16

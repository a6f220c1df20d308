// Softmax of attention units (32 queries by 32 keys of one head, see tree_attention_units.h) in fp32. Matrix
// rows are keys, vector lanes are queries. Exponents are base 2: `scale` is the attention's scale times
// log2(e).
#pragma once

#include "kernels/common/avx.h"
#include "kernels/tree_attention/unit_mask.h"

namespace bough {

// The running softmax of 32 queries of one head, for all keys processed so far.
struct OnlineSoftmax {
  float* max;     // [32]; the largest scaled score, or at most 8 below it
  float* sums;    // [32]
  float* o;       // [32][width], unnormalised
  int64_t width;  // a multiple of 16
};

constexpr float kSlack = 8;  // exponent of 2; avoids most rescaling and costs no precision

}  // namespace bough

// Replaces scores q·k [units][32 keys][32 queries] by unnormalised probabilities in place, and adds the
// probabilities to sums. If a scaled score is more than 8 above max, max is raised, and sums and o are
// rescaled.
BOUGH_AVX_DECLARE(void online_softmax(float* scores, const UnitMask* masks, int64_t units, float scale,
                                      const OnlineSoftmax& rows))

// Replaces the scores of a unit, and the gradients d_p of its probabilities, in place by
//   p = 2^(scale · score - lse), dS = p (d_p - dot)
// scores, d_p: [32 keys][32 queries], the rows of keys `stride` elements apart. lse (base 2), dots (D): one
// for each of the 32 queries. Invisible pairs become 0.
BOUGH_AVX_DECLARE(void softmax_backward(float* scores, float* d_p, int64_t stride, const UnitMask& mask,
                                        float scale, const float* lse, const float* dots))

// Stores the first num_rows rows of `sums` [32][width], the gradients of keys or values, times `scale` to
// rows of `out` with head_dim elements. If `add`, adds to the rows of `out`, else overwrites them.
BOUGH_AVX_DECLARE(void store_gradients(const float* sums, int64_t width, float scale, int64_t num_rows,
                                       bool add, float* out, int64_t out_stride, int64_t head_dim))

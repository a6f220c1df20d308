// Softmax of units of attention in fp32, keys in rows and queries in lanes. `scale` here is the attention's
// scale times log2(e), and exponents are base 2.
#pragma once

#include "kernels/tree_attention/unit_mask.h"

namespace bough::avx512 {

// Running softmax of 32 queries of one head, over all keys so far.
struct OnlineSoftmax {
  float* max;     // [32], scaled: a score, at most a few powers of two below the largest
  float* sums;    // [32]
  float* o;       // [32][width], unnormalised
  int64_t width;  // a multiple of 16
};

// Sets up the running softmax before the first keys.
void begin_softmax(const OnlineSoftmax& rows);
// Turns scores q·k [units][32 keys][32 queries] into unnormalised probabilities in their place, added to
// sums; max, sums and o are rescaled where a score rises far above max.
void online_softmax(float* scores, const UnitMask* masks, int64_t units, float scale,
                    const OnlineSoftmax& rows);

// Turns scores of a unit, rows of `stride`, and the gradients of its probabilities in the same order into
//   p = 2^(scale · score - lse), dS = p (d_p - dot), in their place
// lse (base 2), dots: of the 32 queries.
void softmax_backward(float* scores, float* d_p, int64_t stride, const UnitMask& mask, float scale,
                      const float* lse, const float* dots);

// Stores 32 key gradients [32][width] · scale to rows of out, of head_dim: added or overwritten.
void store_gradients(const float* sums, int64_t width, float scale, int64_t num_rows, bool add, float* out,
                     int64_t out_stride, int64_t head_dim);

}  // namespace bough::avx512

// Unit masks as AVX-512 lane masks, for files that use intrinsics.
#pragma once

#include <immintrin.h>

#include "kernels/tree_attention/unit_mask.h"

namespace bough {

static inline __m512i lane_numbers() {
  return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

// Returns the mask of the queries in half 0 or 1 of a unit that see `key`. mask.end must not be nullptr.
static inline __mmask16 visible_lanes(const UnitMask& mask, int64_t key, int64_t half) {
  const __m512i q = _mm512_add_epi32(
      _mm512_set1_epi32(mask.first_query + static_cast<int32_t>(half * kLanes)), lane_numbers());
  const __mmask16 past =
      _mm512_cmple_epi32_mask(_mm512_set1_epi32(mask.first_key + static_cast<int32_t>(key)), q);
  return _mm512_mask_cmplt_epi32_mask(past, q, _mm512_set1_epi32(mask.end[key]));
}

}  // namespace bough

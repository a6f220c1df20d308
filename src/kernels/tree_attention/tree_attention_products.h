// Products of attention's units of bf16 (tree_attention_softmax_bf16.h), several units at a call, in the two
// ways of bf16_products.h. Tiles are on (bf16::begin_tiles). Factors are packed as matrix_product_tiles.h has
// them. AMX reads left factors (of keys, at heads of up to 64) past the nearest cache, where scores and sums
// stay: a tile's stores that miss it cost as much as the products.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

namespace amx {
// Computes scores of units = k·q: k[count] left factors [32 keys, depth], q a right factor [depth, 32
// queries]. Queries of a unit lie in two halves: scores [count][2][32 keys][16 queries].
void multiply_keys(float* scores, const BFloat16Bits* const* k, int64_t count, const BFloat16Bits* q,
                   int64_t depth);
// Computes o[width][32 queries] (=, or += ) v·p: v[count] left factors [width, 32 keys]; p [count] units as
// softmax_units leaves them.
void add_values(float* o, bool accumulate, const BFloat16Bits* const* v, const float* p, int64_t count,
                int64_t width);
}  // namespace amx

namespace dots {
void multiply_keys(float* scores, const BFloat16Bits* const* k, int64_t count, const BFloat16Bits* q,
                   int64_t depth);
void add_values(float* o, bool accumulate, const BFloat16Bits* const* v, const float* p, int64_t count,
                int64_t width);
}  // namespace dots

}  // namespace bough

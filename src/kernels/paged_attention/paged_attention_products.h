// Products of paged_attention_bf16.cpp, up to 16 entries with some pages at a call, in the two ways of
// matrix_product/bf16_products.h. An entry's sums do not depend on the other entries or pages.
#pragma once

#include "kernels/paged_attention/paged_attention_task.h"

namespace bough {

constexpr int64_t kEntriesTogether = 16, kMostPages = 8;  // of a call

// One head's keys or values in some pages (pages.h), and in pages that are brought near meanwhile.
struct PageFactors {
  const BFloat16Bits* const* pages;
  const BFloat16Bits* const* ahead;
  int64_t count;
};

namespace amx {
// Called before the functions below, for so many entries.
void begin_rows(int64_t entries);
// scores[page][16 entries][16 keys] = q·k of `entries`; q[entries][padded_H].
void multiply_keys(float* scores, const BFloat16Bits* q, int64_t entries, int64_t padded_H,
                   const PageFactors& keys);
// o[entries][padded_H] += weights[page][16 entries][16 keys] · values.
void add_values(float* o, int64_t entries, int64_t padded_H, const BFloat16Bits* weights,
                const PageFactors& values);
}  // namespace amx

namespace dots {
void multiply_keys(float* scores, const BFloat16Bits* q, int64_t entries, int64_t padded_H,
                   const PageFactors& keys);
void add_values(float* o, int64_t entries, int64_t padded_H, const BFloat16Bits* weights,
                const PageFactors& values);
}  // namespace dots

}  // namespace bough

// Matrix products of paged_attention_bf16.cpp, for up to 16 entries (TaskView) and a few pages per call, by
// AMX tiles or by AVX-512 dot products (matrix_product/bf16_products.h). The sums of an entry do not depend
// on the other entries or pages of the call.
#pragma once

#include "kernels/paged_attention/paged_attention_task.h"

namespace bough {

constexpr int64_t kEntriesTogether = 16, kMostPages = 8;  // limits of a call

// The keys, or the values, of one head in `count` pages (pages.h), and as many later pages to prefetch.
struct PageFactors {
  const BFloat16Bits* const* pages;
  const BFloat16Bits* const* ahead;
  int64_t count;
};

namespace amx {
// Configures the AMX tiles for this number of entries. The caller must call it before the functions below.
void begin_rows(int64_t entries);
// scores[page][16 entries][16 keys] = q·k of the first `entries` entries. q: [entries][padded_H].
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

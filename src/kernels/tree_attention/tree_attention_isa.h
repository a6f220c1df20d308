// Loads and stores of matrix rows for fp32 tree attention, compiled per instruction set (common/isa.h).
#pragma once

#include <cstdint>

#include "kernels/common/isa.h"

// Loads num_rows matrix rows as fp32 to dst [padded_rows][dst_stride]. All other elements of dst become
// zeros.
BOUGH_ISA_DECLARE(template <class T> void load_rows(float* dst, int64_t dst_stride, int64_t padded_rows,
                                                    const T* src, int64_t src_stride, int64_t num_rows,
                                                    int64_t head_dim))
// out[i][0..head_dim) = rows[i] · factors[i] for i < num_rows; if one_factor, rows[i] · factors[0].
BOUGH_ISA_DECLARE(template <class T> void store_rows(T* out, int64_t out_stride, const float* rows,
                                                     int64_t stride, const float* factors, bool one_factor,
                                                     int64_t num_rows, int64_t head_dim))
// sums[i] = d_o[i]·o[i] of `width` elements.
BOUGH_ISA_DECLARE(template <class T> void row_dots(float* sums, const T* d_o, const T* o, int64_t num_rows,
                                                   int64_t width, int64_t stride))

// Rows of attention's operands, of any element type, beside its products in fp32.
#pragma once

#include <cstdint>

#include "kernels/common/isa.h"

// dst[num_rows, zero rows up to padded_rows][dst_stride], columns from head_dim on zeros.
BOUGH_ISA_DECLARE(template <class T> void load_rows(float* dst, int64_t dst_stride, int64_t padded_rows,
                                                    const T* src, int64_t src_stride, int64_t num_rows,
                                                    int64_t head_dim))
// out[i][0..head_dim) = rows[i] · factors[i], or · factors[0] where there is one factor.
BOUGH_ISA_DECLARE(template <class T> void store_rows(T* out, int64_t out_stride, const float* rows,
                                                     int64_t stride, const float* factors, bool one_factor,
                                                     int64_t num_rows, int64_t head_dim))
// sums[i] = d_o[i] . o[i]
BOUGH_ISA_DECLARE(template <class T> void row_dots(float* sums, const T* d_o, const T* o, int64_t num_rows,
                                                   int64_t width, int64_t stride))

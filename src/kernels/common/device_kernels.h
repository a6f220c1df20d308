// The kernels that a device uses, as far as cost estimates depend on them. No torch.
#pragma once

#include <cstdint>

namespace bough {

struct DeviceKernels {
  // The attention kernel. It determines which temporary tensors attention allocates.
  enum class Attention {
    kTiles,      // our CPU kernels in units of 32 x 32, in the accumulator type
    kBf16Tiles,  // the same with bf16 tiles (kernels/matrix_product), which bf16 matrix products use, too
    kReference,  // dense score matrices (fp64, CPUs without AVX2)
    kFused,      // GPU kernels: the only temporaries are gradients in the accumulator type
    // On a GPU, dense score matrices: in fp64, and if the self-test left out the GPU kernels.
    kReferenceOnGpu,
  };

  Attention attention = Attention::kTiles;
  // Whether our CPU kernels (kernels/matrix_product), which pack factors into scratch memory, compute matrix
  // products: with kBf16Tiles the bf16 products, with other attention kernels the products in the accumulator
  // type. libtorch computes all other products.
  bool packs_factors = false;
  // Whether bf16 factors of a product are copied to fp32, a block at a time (CPUs without has_fast_bf16(),
  // isa.h).
  bool copies_factors = false;
  // On a GPU, if the self-test left out add_matrix_product_: gradients of bf16 weights are products of fp32
  // copies of the factors.
  bool widens_factors = false;
  int64_t threads = 1;  // threads of a kernel, each with its own partial sums; 1 on a GPU

  bool on_gpu() const { return attention == Attention::kFused || attention == Attention::kReferenceOnGpu; }
  bool by_reference() const {
    return attention == Attention::kReference || attention == Attention::kReferenceOnGpu;
  }
  bool has_bf16_tiles() const { return attention == Attention::kBf16Tiles; }
};

// Bytes of an element of weights and activations, and of an accumulator of gradients, softmax and norms.
struct ElementSizes {
  int64_t element = 4, accumulator = 4;
};

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

inline int64_t rounded_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

}  // namespace bough

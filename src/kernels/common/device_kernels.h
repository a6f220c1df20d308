// Which of the ways to compute its ops a device takes, as far as it decides what they cost; no torch.
#pragma once

#include <cstdint>

namespace bough {

struct DeviceKernels {
  // How attention works decides which temporaries it needs.
  enum class Attention {
    kTiles,      // our CPU kernels in units of 32 x 32, in the accumulator type
    kBf16Tiles,  // the same with tiles of bf16; matrix products are of such tiles, too
    kReference,  // dense matrices of scores (fp64, CPUs without AVX-512)
    kFused,      // a GPU's: gradients in the accumulator type, nothing else
  };

  Attention attention = Attention::kTiles;
  // Products in the accumulator type (with kBf16Tiles: in bf16) are kernels/matrix_product's own, which pack
  // factors.
  bool packs_factors = false;
  int64_t threads = 1;  // that share a kernel's work, each with partial sums of its own; 1 on a GPU

  bool on_gpu() const { return attention == Attention::kFused; }
  bool has_bf16_tiles() const { return attention == Attention::kBf16Tiles; }
};

// Bytes of an element of weights and activations, and of what gradients, softmax and norms are summed in.
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

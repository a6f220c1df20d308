// The cost of gated activations, from shapes alone. No torch.
#pragma once

#include <cstdint>

namespace bough {

// Elements that forward reads and writes per token: gate, up and y. width: F.
constexpr int64_t swiglu_elements(int64_t width) {
  return 3 * width;
}

}  // namespace bough

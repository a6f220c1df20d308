// The cost of the step between the qkv projection and attention, from shapes alone. No torch.
#pragma once

#include <cstdint>

namespace bough {

// Elements that forward reads and writes per token. width: all heads of q, k and v, (N + 2G) · H.
constexpr int64_t qk_norm_rotary_elements(int64_t width) {
  return 2 * width;
}

}  // namespace bough

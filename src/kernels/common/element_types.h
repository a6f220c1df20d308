// Element types shared by *_isa.cpp files and their callers.
#pragma once

#include <cstdint>

namespace bough {

// Bit-compatible with c10::BFloat16.
struct BFloat16Bits {
  uint16_t bits;
};

}  // namespace bough

// The element type that a setting `dtype` names.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace bough {

// fp32 | bf16 | fp64; settings have checked that it is one of these.
inline at::ScalarType scalar_type_of(const std::string& dtype) {
  return dtype == "bf16" ? at::kBFloat16 : dtype == "fp64" ? at::kDouble : at::kFloat;
}

}  // namespace bough

// What must happen when this library is loaded, by the bough program, a test or Python alike, before libtorch
// multiplies its first bf16 matrices.
#include "base/cpu.h"

namespace bough {
namespace {
[[maybe_unused]] const bool workarounds_applied = (apply_cpu_workarounds(), true);
}
}  // namespace bough

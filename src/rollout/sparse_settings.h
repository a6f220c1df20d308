// From the settings of sparse attention to the policy that the kernels take.
#pragma once

#include "engine/settings.h"
#include "kernels/page_choice/sparse_policy.h"

namespace bough {

// Returns the policy by which an engine on the device chooses blocks. Throws UserError if `summary` is exact
// and the device is not the CPU.
SparsePolicy sparse_policy(const SparseSettings& settings, at::Device device);

}  // namespace bough

// From the settings of sparse attention to the policy that the kernels take.
#pragma once

#include "engine/settings.h"
#include "kernels/page_choice/sparse_policy.h"

namespace bough {

// Returns the policy by which an engine on the device chooses blocks. Throws UserError if the settings are
// invalid, or the device is a GPU and they need a CPU (`summary: exact`, blocks that are not pages).
SparsePolicy sparse_policy(const SparseSettings& settings, at::Device device);

}  // namespace bough

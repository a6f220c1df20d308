// The cost model of the commands: which device, which model.
#pragma once

#include <cstdint>
#include <string>

#include "models/config.h"
#include "tree/cost_model.h"
#include "tree/prefix_tree.h"

namespace bough {

// B where the user gives none. On a CPU a thousand tokens hold most responses in one pass and are still near its
// caches; a GPU needs more to be full.
inline constexpr int64_t kDefaultMaxTokensPerPass = 2048;
inline constexpr int64_t kDefaultMaxTokensPerPassOfGpu = 16384;

// device: cpu (measured once on this machine and cached) or the name of a built-in profile. UserError lists them.
DeviceProfile device_profile(const std::string& device, const std::string& dtype);

// Of the forward pass; backward is twice that for each term, so ratios of steps are ratios of these.
WorkModel work_model(const ModelShape& shape);

}  // namespace bough

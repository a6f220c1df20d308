// The cost model of the commands: which device, which model.
#pragma once

#include <cstdint>
#include <string>

#include "models/config.h"
#include "cost/cost_model.h"

namespace bough {

// B where the user gives none. On a CPU a thousand tokens hold most responses in one pass and are still near its
// caches; a GPU needs more to be full.
inline constexpr int64_t kDefaultMaxTokensPerPass = 2048;
inline constexpr int64_t kDefaultMaxTokensPerPassOfGpu = 16384;

// device: cpu (measured once on this machine and cached) or the name of a built-in profile. UserError lists them.
DeviceProfile device_profile(const std::string& device, const std::string& dtype);

}  // namespace bough

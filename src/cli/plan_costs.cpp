#include "cli/plan_costs.h"

#include "base/error.h"
#include "cli/torch_options.h"
#include "cost/profile_cache.h"

namespace bough {

DeviceProfile device_profile(const std::string& device, const std::string& dtype) {
  if (device == "cpu") return cached_cpu_profile(parse_dtype(dtype));
  try {
    return built_in_profile(device, dtype);
  } catch (const UserError& error) {
    throw UserError(str("--", error.what(), "; cpu is this machine"));
  }
}

}  // namespace bough

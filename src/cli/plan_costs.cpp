#include "cli/plan_costs.h"

#include "cli/torch_options.h"
#include "train/profile_cache.h"

namespace bough {

DeviceProfile device_profile(const std::string& device, const std::string& dtype) {
  return device == "cpu" ? cached_cpu_profile(parse_dtype(dtype)) : built_in_profile(device, dtype);
}

WorkModel work_model(const ModelShape& shape) {
  WorkModel work;
  work.flops_per_token = shape.linear_flops_per_token();
  work.flops_per_head_row = shape.flops_per_head_row();
  work.flops_per_pair = shape.flops_per_pair();
  return work;
}

}  // namespace bough

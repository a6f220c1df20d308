#include "cost/run_costs.h"

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "cost/model_shape.h"
#include "cost/profile_cache.h"

namespace bough {

DeviceProfile profile_of(const Model& model, const std::function<bool()>& stop) {
  if (model.device().is_cuda())
    return built_in_profile("h100", model.dtype() == at::kBFloat16 ? "bf16" : "fp32");
  return cached_cpu_profile(model.dtype(), stop);
}

CostModel run_costs(const std::filesystem::path& folder, const std::string& from, const Model& model,
                    const std::function<bool()>& stop) {
  const auto file = folder / "calibration.json";
  const bool begun = std::filesystem::exists(file);
  const std::filesystem::path source = begun ? file : std::filesystem::path(from);
  const DeviceProfile profile =
      source.empty() ? profile_of(model, stop) : DeviceProfile::from_json(read_json(source), source.string());
  const ModelShape shape = model_shape(model.config(), model.dtype());
  if (profile.dtype != dtype_name(model.dtype()))
    throw UserError(str(source.string(), ": measured in ", profile.dtype, ", but the model computes in ",
                        dtype_name(model.dtype()), "; take a calibration of that type, or none"));
  if (!begun) write_file_atomically(file, dump_pretty(profile.to_json()));
  return CostModel(profile, shape);
}

StepCosts step_costs(CostModel costs) {
  const double rate = costs.device().matrix_product_rate();
  const WorkModel work = work_model(costs.shape());
  return {std::make_shared<CostModel>(std::move(costs)), work, rate};
}

}  // namespace bough

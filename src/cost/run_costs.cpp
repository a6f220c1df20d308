#include "cost/run_costs.h"

#include <ATen/Parallel.h>

#include <time.h>

#include <chrono>
#include <optional>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "base/json.h"
#include "base/log.h"
#include "cost/calibrate.h"
#include "kernels/common/cuda_library.h"
#include "kernels/common/device.h"

namespace bough {

namespace {

namespace fs = std::filesystem;

// Increase whenever kernels, the executor or the cost model change the measurements or their meaning.
constexpr int64_t kVersion = 8;

// How long a measurement stays valid that was made while other programs were busy.
constexpr std::chrono::minutes kProvisional{10};

// The key is also stored in the file, because file names do not contain the whole key.
Json to_json(const ProfileKey& key) {
  return {{"version", kVersion}, {"device", key.device}, {"threads", key.threads}, {"dtype", key.dtype}};
}

std::optional<DeviceProfile> read_profile(const fs::path& file, const ProfileKey& key) {
  std::error_code ignored;
  if (!fs::exists(file, ignored)) return {};
  try {
    const Json json = read_json(file);
    if (!json.is_object() || json.value("measured_for", Json()) != to_json(key)) {
      log_info(str(file.string(), " is for another version or device; measuring again"));
      return {};
    }
    const auto age = fs::file_time_type::clock::now() - fs::last_write_time(file);
    if (json.value("provisional", false) && age > kProvisional) {
      log_info(str(file.string(), " was measured while other programs were busy; measuring again"));
      return {};
    }
    return DeviceProfile::from_json(json.value("profile", Json()), str(file.string(), ": profile"));
  } catch (const std::exception& error) {
    log_warning(str(error.what(), "; measuring again"));
    return {};
  }
}

// The measuring thread computes all the time or waits for threads that compute. If its CPU time is below this
// fraction of the elapsed time, other programs took its core and the rates are too low. Such a measurement is
// kept only for kProvisional.
constexpr double kLeastShare = 0.8;
constexpr double kShortest = 0.2;  // seconds; the fraction of a shorter measurement says nothing

double thread_cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void write_profile(const fs::path& file, const ProfileKey& key, const DeviceProfile& profile,
                   bool provisional) {
  try {
    make_directories(file.parent_path());
    write_file_atomically(file, dump_pretty({{"measured_for", to_json(key)},
                                             {"provisional", provisional},
                                             {"profile", profile.to_json()}}));
  } catch (const std::exception& error) {
    log_warning(str("cannot save the measurement for later runs: ", error.what()));
  }
}

}  // namespace

ProfileKey profile_key(at::Device device, at::ScalarType dtype) {
  if (!device.is_cpu()) {
    ProfileKey key{device_name(device), 0, dtype_name(dtype)};
    for (const std::string& kernel : left_out_kernels()) key.device += str(", without ", kernel);
    return key;
  }
  const std::string model = cpu_model();
  return {str(model.empty() ? "cpu" : model, ", ", describe(cpu_features())), at::get_num_threads(),
          dtype_name(dtype)};
}

DeviceProfile cached_profile(const fs::path& folder, const ProfileKey& key,
                             const std::function<DeviceProfile()>& measure) {
  const fs::path file = folder / str("profile-", file_name_part(key.device), "-", key.threads, "-threads-",
                                     file_name_part(key.dtype), ".json");
  if (!folder.empty())
    if (auto profile = read_profile(file, key)) return *std::move(profile);
  const bool is_cpu = key.threads > 0;
  log_info(str("measuring this ", is_cpu ? "CPU" : "GPU", " once, for the planner (", key.device, "; ",
               is_cpu ? str(key.threads, " threads, ") : "", key.dtype, "): about 7 s"));
  const auto begin = std::chrono::steady_clock::now();
  const double cpu_begin = thread_cpu_seconds();
  DeviceProfile profile = measure();
  const double seconds = seconds_since(begin);
  const double share = (thread_cpu_seconds() - cpu_begin) / std::max(seconds, 1e-9);
  if (is_cpu && seconds > kShortest && share < kLeastShare) {
    log_warning(str(
        "measured in ", format_duration(seconds), ", with a core for only ",
        format_significant(100 * share, 2),
        "% of that time: other programs were busy. Gradients are correct, but plans may not be the fastest; "
        "a run that starts more than ten minutes later measures again"));
    if (!folder.empty()) write_profile(file, key, profile, true);
    return profile;
  }
  log_debug(str("measured in ", format_duration(seconds)));
  if (!folder.empty()) write_profile(file, key, profile, false);
  return profile;
}

DeviceProfile measured_profile(at::Device device, at::ScalarType dtype, const std::function<bool()>& stop) {
  return cached_profile(cache_folder(), profile_key(device, dtype),
                        [&] { return calibrate(device, dtype, {.stop = stop, .show_progress = true}); });
}

DeviceProfile device_profile(const std::string& device, at::ScalarType dtype) {
  if (device == "cpu") return measured_profile(at::kCPU, dtype);
  try {
    return built_in_profile(device, dtype_name(dtype));
  } catch (const UserError& error) {
    throw UserError(str("--", error.what(), "; use cpu for this machine"));
  }
}

namespace {

DeviceProfile profile_of(at::Device device, at::ScalarType dtype, const std::function<bool()>& stop) {
  const std::string_view known = built_in_name(device_name(device));
  // A built-in profile has the rates of the fastest kernels.
  if (!known.empty() && dtype != at::kDouble && left_out_kernels().empty())
    return built_in_profile(known, dtype_name(dtype));
  return measured_profile(device, dtype, stop);
}

}  // namespace

ModelShape model_shape(const Model& model, bool has_router_losses) {
  // For a pipeline stage: the shape of the whole model, so that all stages make the same plan. Memory is
  // predicted well too: the first stage has as many passes in progress as there are stages, each with the
  // activations of its layers only. Together they take about as much as one pass through all layers.
  ModelConfig config = model.config();
  config.num_layers = model.unsharded_config().num_layers;
  config.layer_ropes = model.unsharded_config().layer_ropes;
  ModelShape shape = model_shape(config, dtype_name(model.dtype()));
  shape.adapter_elements = model.adapter_elements();
  shape.head_adapter_elements = model.head_adapter_elements();
  shape.has_router_losses = has_router_losses;
  shape.has_wide_logits = model.logits_dtype() != model.dtype();
  return shape;
}

CostModel model_costs(const Model& model, const std::function<bool()>& stop, bool has_router_losses) {
  return CostModel(profile_of(model.device(), model.dtype(), stop), model_shape(model, has_router_losses));
}

CostModel shared_costs(const Model& model, Communicator& ranks) {
  const std::string own =
      ranks.rank() == 0 ? profile_of(model.device(), model.dtype(), {}).to_json().dump() : "";
  return CostModel(DeviceProfile::from_json(Json::parse(ranks.broadcast(own)), "rank 0's device profile"),
                   model_shape(model));
}

namespace {
std::filesystem::path calibration_in(const std::filesystem::path& folder) {
  return folder / "calibration.json";
}
}  // namespace

DeviceProfile run_profile(const std::filesystem::path& folder, const std::string& from, at::Device device,
                          at::ScalarType dtype, const std::function<bool()>& stop) {
  const auto file = calibration_in(folder);
  const std::filesystem::path source = std::filesystem::exists(file) ? file : std::filesystem::path(from);
  if (source.empty()) return profile_of(device, dtype, stop);
  DeviceProfile profile = DeviceProfile::from_json(read_json(source), source.string());
  if (profile.dtype != dtype_name(dtype))
    throw UserError(str(source.string(), ": measured in ", profile.dtype, ", but the model computes in ",
                        dtype_name(dtype), "; use a calibration of that dtype, or none"));
  // Memory is planned for the kernels that run, also if the self-test has left some out since.
  if (!device.is_cpu()) {
    const DeviceKernels now = kernels_of(device, dtype);
    if (now.attention != profile.kernels.attention)
      log_warning(str(source.string(),
                      " was measured with other attention kernels than this run has: plans "
                      "fit the memory, but may not be the fastest"));
    profile.kernels = now;
  }
  return profile;
}

void save_run_profile(const std::filesystem::path& folder, const DeviceProfile& profile) {
  const auto file = calibration_in(folder);
  if (!std::filesystem::exists(file)) write_file_atomically(file, dump_pretty(profile.to_json()));
}

CostModel critic_costs(const CostModel& costs, const Model& backbone) {
  ModelShape shape = model_shape(backbone);
  shape.vocab_size = 1;
  return CostModel(costs.device(), shape);
}

StepCosts step_costs(CostModel costs) {
  const double rate = costs.device().matrix_product_rate();
  const WorkModel work = work_model(costs.shape());
  return {std::make_shared<CostModel>(std::move(costs)), work, rate};
}

}  // namespace bough

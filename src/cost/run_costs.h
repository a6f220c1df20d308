// Makes the cost model for the planner from a device's profile and a model. A profile is measured once on a
// machine, cached for later runs, and saved with each run.
#pragma once

#include <c10/core/ScalarType.h>

#include <filesystem>
#include <functional>
#include <string>

#include "comm/communicator.h"
#include "cost/cost_model.h"
#include "models/model.h"
#include "train/trainer.h"

namespace bough {

// Default of B, the maximum number of tokens per pass, for commands that measure one step on a CPU: a pass
// of this size holds most responses, and its tensors mostly fit into the caches. On a GPU:
// kMaxTokensPerPassOfGpu.
inline constexpr int64_t kDefaultMaxTokensPerPass = 2048;

// The conditions that a profile was measured under. The profile is not valid for another processor, number of
// threads or dtype.
struct ProfileKey {
  std::string device;   // a CPU's model name and instruction sets; a GPU's name and the left-out kernels
  int64_t threads = 0;  // 0: a GPU
  std::string dtype;
};
ProfileKey profile_key(c10::Device device, at::ScalarType dtype);  // with libtorch's number of threads

// Returns the profile that `folder` holds for the key. Otherwise calls measure() and writes its result to the
// folder atomically. An empty `folder` means no cache. The log says what is measured and why.
// - A file that cannot be read or has another format version is measured again and replaced.
// - If the folder cannot be written, a warning is logged.
// - If other programs kept the cores busy during the measurement, a warning is logged and the file is valid
//   for ten minutes only.
DeviceProfile cached_profile(const std::filesystem::path& folder, const ProfileKey& key,
                             const std::function<DeviceProfile()>& measure);

// calibrate() with the cache: the first call takes some seconds, later calls read a file. If stop() returns
// true between measurements, throws Interrupted and writes nothing.
DeviceProfile measured_profile(c10::Device device, at::ScalarType dtype,
                               const std::function<bool()>& stop = {});

// device: the value of option --device, which is cpu (measured once on this machine and cached) or the name
// of a built-in profile. Throws UserError, with the list of names, for other values.
DeviceProfile device_profile(const std::string& device, at::ScalarType dtype);

// has_router_losses: ModelShape::has_router_losses, here and in model_costs().
ModelShape model_shape(const Model& model, bool has_router_losses = false);

// Costs on the model's device. Uses the built-in profile that was measured on such a GPU, if there is one,
// the dtype is fp32 or bf16, and no kernel is left out. Otherwise the device is measured once and cached.
// Throws Interrupted if stop() returns true during the measurement.
CostModel model_costs(const Model& model, const std::function<bool()>& stop, bool has_router_losses = false);

// Collective call. Returns the same costs on every rank: those of rank 0's device. So all ranks make the same
// plans.
CostModel shared_costs(const Model& model, Communicator& ranks);

// The profile in the run's calibration.json in `folder`. If the file does not exist: that of the file
// `from`, or if `from` is empty that of the device, as in model_costs(). So plans of a run depend only on its
// batches, also after a resume. Call it before weights fill the device's memory, which a measurement needs,
// too. Throws UserError if a file is missing, malformed or for another dtype.
DeviceProfile run_profile(const std::filesystem::path& folder, const std::string& from, c10::Device device,
                          at::ScalarType dtype, const std::function<bool()>& stop);
// Writes the run's calibration.json if it does not exist.
void save_run_profile(const std::filesystem::path& folder, const DeviceProfile& profile);

// Costs on the same device for a critic with this backbone, whose value_head has one output.
CostModel critic_costs(const CostModel& costs, const Model& backbone);

// Converts a cost model to the trainer's input.
StepCosts step_costs(CostModel costs);

}  // namespace bough

// The cost model that plans are made from: which device's profile, measured once on a machine and kept for
// later runs and with each run, and which model.
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

// B where the user gives none. On a CPU a thousand tokens hold most responses in one pass and are still near
// its caches; a GPU needs more to be full.
inline constexpr int64_t kDefaultMaxTokensPerPass = 2048;
inline constexpr int64_t kDefaultMaxTokensPerPassOfGpu = 16384;

// What a profile is measured for: of another processor, number of threads, dtype or version of the
// measurement it says nothing.
struct ProfileKey {
  std::string device;   // a CPU's model name and instruction sets; a GPU's name
  int64_t threads = 0;  // 0: of a GPU
  std::string dtype;
};
ProfileKey profile_key(c10::Device device, at::ScalarType dtype);  // with libtorch's present threads

// $BOUGH_CACHE, else $XDG_CACHE_HOME/bough, else ~/.cache/bough; empty where none of these is set.
std::filesystem::path cache_folder();

// The profile that the folder holds for the key; else what `measure` returns, which is then written there,
// whole or not at all. The log says what is measured and why. A file that is unreadable or of another version
// is measured again and replaced; a folder that cannot be written is a warning; an empty one stands for no
// cache. What was measured while other programs kept the cores busy is a warning, and good for ten minutes.
DeviceProfile cached_profile(const std::filesystem::path& folder, const ProfileKey& key,
                             const std::function<DeviceProfile()>& measure);

// calibrate() through the cache: some seconds once, then a file.
// Where `stop` says so between pieces of work, Interrupted, and nothing is written.
DeviceProfile measured_profile(c10::Device device, at::ScalarType dtype,
                               const std::function<bool()>& stop = {});

// device, an option: cpu (measured once on this machine and cached) or the name of a built-in profile.
// UserError lists them.
DeviceProfile device_profile(const std::string& device, at::ScalarType dtype);

ModelShape model_shape(const Model& model);

// Costs on the model's own device, measured once on this machine and cached; of the GPUs that have one, in
// fp32 and bf16, the built-in profile. Interrupted where `stop` says so meanwhile.
CostModel model_costs(const Model& model, const std::function<bool()>& stop);

// The same of rank 0's device on every rank of a group that plans together.
CostModel shared_costs(const Model& model, Communicator& ranks);

// A run's own calibration.json in `folder`: what stands there; else a copy of `from` (another run's, where it
// is not empty); else the profile of model_costs(model, stop), saved. So plans of a run, and of one resumed,
// are a function of its batches alone. UserError: `from` is missing, malformed, or of another element type
// than the model.
CostModel run_costs(const std::filesystem::path& folder, const std::string& from, const Model& model,
                    const std::function<bool()>& stop);

// The same device's for a critic over this backbone: a head of one value in place of the vocabulary's.
CostModel critic_costs(const CostModel& costs, const Model& backbone);

// A cost model as the trainer takes it.
StepCosts step_costs(CostModel costs);

}  // namespace bough

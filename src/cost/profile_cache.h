// This CPU's profile, measured once on a machine and kept for later runs.
#pragma once

#include <c10/core/ScalarType.h>

#include <filesystem>
#include <functional>
#include <string>

#include "cost/device_profile.h"

namespace bough {

// What a profile is measured for: of another processor, number of threads, dtype or version of the measurement it
// says nothing.
struct ProfileKey {
  std::string cpu;  // model name and instruction sets
  int64_t threads = 0;
  std::string dtype;
};
ProfileKey this_cpu(at::ScalarType dtype);  // with libtorch's present number of threads

// $BOUGH_CACHE, else $XDG_CACHE_HOME/bough, else ~/.cache/bough; empty where none of these is set.
std::filesystem::path cache_folder();

// The profile that the folder holds for the key; else what `measure` returns, which is then written there, whole or
// not at all. The log says what is measured and why. A file that is unreadable or of another version is measured again
// and replaced; a folder that cannot be written is a warning; an empty one stands for no cache. What was measured while
// other programs kept the cores busy is a warning, and good for ten minutes.
DeviceProfile cached_profile(const std::filesystem::path& folder, const ProfileKey& key,
                             const std::function<DeviceProfile()>& measure);

// calibrate_cpu() through the cache: some seconds once, then a file.
// Where `stop` says so between pieces of work, Interrupted, and nothing is written.
DeviceProfile cached_cpu_profile(at::ScalarType dtype, const std::function<bool()>& stop = {});

}  // namespace bough

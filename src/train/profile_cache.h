// This CPU's profile, measured once on a machine and kept for later runs.
#pragma once

#include <c10/core/ScalarType.h>

#include <filesystem>

#include "tree/device_profile.h"

namespace bough {

// $BOUGH_CACHE, else $XDG_CACHE_HOME/bough, else ~/.cache/bough; empty where none of these is set.
std::filesystem::path cache_folder();

// The profile for libtorch's present number of threads: from the cache, else measured (some seconds; the log says so)
// and saved there. What is found unreadable or of another version is measured again; a folder that cannot be written
// is a warning.
DeviceProfile cached_cpu_profile(at::ScalarType dtype);

}  // namespace bough

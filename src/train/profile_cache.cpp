#include "train/profile_cache.h"

#include <ATen/Parallel.h>

#include <cctype>
#include <cstdlib>
#include <fstream>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "train/calibrate.h"

namespace bough {

namespace {

namespace fs = std::filesystem;

// Raised whenever kernels or the cost model change what is measured.
constexpr int kVersion = 1;

fs::path from_environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? fs::path(value) : fs::path();
}

// "intel-r-xeon-r-platinum-8480": of /proc/cpuinfo, as a file's name.
std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  std::string line, name;
  while (std::getline(info, line))
    if (line.starts_with("model name")) break;
  for (const char c : line.substr(std::min(line.size(), line.find(':') + 1))) {
    if (std::isalnum(static_cast<unsigned char>(c)))
      name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    else if (!name.empty() && name.back() != '-') name += '-';
  }
  while (name.ends_with('-')) name.pop_back();
  return name.empty() ? "cpu" : name.substr(0, 80);
}

const char* short_name(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? "bf16" : dtype == at::kDouble ? "fp64" : "fp32";
}

std::optional<DeviceProfile> read_profile(const fs::path& file) {
  try {
    if (!fs::exists(file)) return {};
    return DeviceProfile::from_json(read_json(file), file.string());
  } catch (const std::exception& error) {
    log_warning(str(error.what(), "; it is measured again"));
    return {};
  }
}

}  // namespace

fs::path cache_folder() {
  if (const auto own = from_environment("BOUGH_CACHE"); !own.empty()) return own;
  if (const auto xdg = from_environment("XDG_CACHE_HOME"); !xdg.empty()) return xdg / "bough";
  if (const auto home = from_environment("HOME"); !home.empty()) return home / ".cache" / "bough";
  return {};
}

DeviceProfile cached_cpu_profile(at::ScalarType dtype) {
  const fs::path folder = cache_folder();
  const fs::path file = folder / str("profile-v", kVersion, "-", cpu_name(), "-", at::get_num_threads(),
                                     "-threads-", short_name(dtype), ".json");
  if (!folder.empty())
    if (auto profile = read_profile(file)) return *std::move(profile);
  log_info(str("measuring this CPU once, for plans: ", short_name(dtype), ", ", at::get_num_threads(),
               " threads, some seconds"));
  const DeviceProfile profile = calibrate_cpu(dtype);
  if (folder.empty()) return profile;
  try {
    make_directories(folder);
    write_file_atomically(file, dump_pretty(profile.to_json()));
  } catch (const std::exception& error) {
    log_warning(str("the measurement is not kept for later runs: ", error.what()));
  }
  return profile;
}

}  // namespace bough

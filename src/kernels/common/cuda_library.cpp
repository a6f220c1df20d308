#include "kernels/common/cuda_library.h"

#include <ATen/Context.h>
#include <dlfcn.h>

#include <cstdlib>
#include <string_view>

#include "base/error.h"

namespace bough {

namespace fs = std::filesystem;

namespace {
constexpr const char* kName = "libbough_cuda.so";

fs::path program_folder() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path();
}
}  // namespace

fs::path find_cuda_library() {
  const fs::path folder = program_folder();
  std::error_code error;
  for (const fs::path& path : {folder / kName, folder.parent_path() / "lib" / kName})
    if (fs::is_regular_file(path, error)) return path;
  return {};
}

void open_cuda_library() {
  const fs::path path = find_cuda_library();
  if (path.empty())
    throw UserError(str("device cuda: ", kName, " is neither in ", quoted(program_folder().string()),
                        " nor in ", quoted((program_folder().parent_path() / "lib").string()),
                        "; build Bough with nvcc installed, or use device cpu"));
  // The library is opened with RTLD_GLOBAL, so that libraries opened later find the same libtorch_cuda. The
  // library is never closed.
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    const char* reason = dlerror();
    throw UserError(str("device cuda: cannot open ", quoted(path.string()), ": ",
                        reason ? reason : "no reason given",
                        "; install a CUDA build of torch, or use device cpu"));
  }
  if (!at::hasCUDA())
    throw UserError(
        "device cuda: found no GPU, expected one that the NVIDIA driver knows (nvidia-smi lists it); "
        "install the driver, or use device cpu");
}

std::unique_ptr<DeviceGraphs> make_device_graphs() {
  const char* const wanted = std::getenv("BOUGH_CUDA_GRAPHS");
  if (wanted && std::string_view(wanted) == "0") return nullptr;
  // The function is defined in cuda_graph_cuda_ops.cpp. RTLD_DEFAULT finds the function, because the library
  // was opened with RTLD_GLOBAL.
  auto* const make = reinterpret_cast<DeviceGraphs* (*)()>(dlsym(RTLD_DEFAULT, "bough_cuda_graphs"));
  return std::unique_ptr<DeviceGraphs>(make ? make() : nullptr);
}

}  // namespace bough

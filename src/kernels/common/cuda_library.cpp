#include "kernels/common/cuda_library.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/AllocatorConfig.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "base/build_id.h"
#include "base/error.h"
#include "base/log.h"
#include "base/run_time_library.h"

namespace bough {

namespace fs = std::filesystem;

namespace {
constexpr const char* kName = "libbough_cuda.so";
}  // namespace

void set_expandable_segments() {
  for (const char* const name : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"})
    if (std::getenv(name)) return;
  c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
}

fs::path find_cuda_library() {
  return find_run_time_library(kName);
}

std::vector<std::string> left_out_kernels() {
  std::vector<std::string> names;
  const char* const listed = std::getenv(kLeaveOutVariable);
  std::istringstream list(listed ? listed : "");
  for (std::string name; std::getline(list, name, ',');)
    if (!name.empty()) names.push_back(name);
  return names;
}

bool is_left_out(std::string_view kernel) {
  const auto names = left_out_kernels();
  return std::find(names.begin(), names.end(), kernel) != names.end();
}

bool has_cuda_kernel(const char* op) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(op, "").hasKernelForDispatchKey(
      c10::DispatchKey::CUDA);
}

const char* kernels_build_id() {
  return build_id();
}

bool cuda_library_is_open() {
  return dlsym(RTLD_DEFAULT, "bough_cuda_device_name") != nullptr;
}

void open_cuda_library(bool sets_allocator) {
  const fs::path path = find_cuda_library();
  if (path.empty())
    throw UserError(str("device cuda: ", kName, " is neither in ", quoted(program_folder().string()),
                        " nor in ", quoted((program_folder().parent_path() / "lib").string()),
                        "; build Bough with nvcc installed, or use device cpu"));
  // Libraries that are opened later find the same libtorch_cuda.
  open_run_time_library({.path = path,
                         .build_id = build_id(),
                         .purpose = "device cuda",
                         .remedy = "install a CUDA build of torch, or use device cpu",
                         .rebuild = "bough and bough_cuda"});
  if (sets_allocator) set_expandable_segments();
  if (!at::hasCUDA())
    throw UserError(
        "device cuda: found no GPU, expected one that the NVIDIA driver knows (nvidia-smi lists it); "
        "install the driver, or use device cpu");
}

bool wants_device_graphs() {
  const char* const wanted = std::getenv("BOUGH_CUDA_GRAPHS");
  return !(wanted && std::string_view(wanted) == "0") && !is_left_out("cuda_graphs");
}

std::unique_ptr<DeviceGraphs> make_device_graphs() {
  if (!wants_device_graphs()) return nullptr;
  // The function is defined in cuda_graph_cuda_ops.cpp. RTLD_DEFAULT finds the function, because the library
  // was opened with RTLD_GLOBAL.
  auto* const make = reinterpret_cast<DeviceGraphs* (*)()>(dlsym(RTLD_DEFAULT, "bough_cuda_graphs"));
  return std::unique_ptr<DeviceGraphs>(make ? make() : nullptr);
}

void record(StreamRecorder& recorder, const std::function<void()>& work) {
  work();
  try {
    recorder.begin();
    work();
    recorder.end();
  } catch (...) {
    recorder.discard();
    throw;
  }
}

std::unique_ptr<DeviceGraph> OptionalGraphs::capture(const std::function<void()>& work) {
  if (make_) graphs_ = std::exchange(make_, nullptr)();
  if (!graphs_ || has_failed_) return nullptr;
  try {
    return graphs_->capture(work);
  } catch (const std::exception& error) {
    has_failed_ = true;
    log_warning(
        str("CUDA graphs: a pass could not be recorded, so new passes run without graphs, which is "
            "slower; the cause: ",
            error.what()));
    return nullptr;
  }
}

}  // namespace bough

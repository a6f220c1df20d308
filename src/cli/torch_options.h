// Options of the commands that compute: element type, threads, device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/settings.h"
#include "cli/command.h"
#include "models/model.h"

namespace bough {

struct TorchOptions {
  std::string dtype;  // empty: fp32, on a GPU bf16
  std::optional<int64_t> threads;
  std::string device = "cpu";
  std::string router_dtype = "fp32", head_dtype = "model";
};

// --dtype, --threads, --device, and for commands that load a model --router-dtype and --head-dtype.
void add_torch_options(Command& command, TorchOptions& options, bool loads_model = true);

struct TorchSetup {
  at::ScalarType dtype;
  at::Device device;
  Precisions precisions;
};

// How set_up_torch() passes on a warning of the self-test of the GPU's kernels (self_tests.h).
using TakeWarning = std::function<void(const std::string&)>;

// --batch-invariant, --no-batch-invariant.
void add_batch_invariant_flag(Command& command, std::optional<bool>& batch_invariant);

// Checks the options, sets the number of threads and installs the counting allocator. Call it before the
// first tensor is made. For device cuda, tests its kernels at the first use, and opens libbough_cuda.so
// (open_tested_cuda_library() in self_tests.h). Throws UserError if an option is wrong, if the library or a
// GPU is missing, or if kernels that a run needs are faulty. warn: log_warning() if empty.
TorchSetup set_up_torch(const TorchOptions& options, const TakeWarning& warn = {});

// Parses "4GiB" or "auto". Throws UserError that names the option.
Bytes parse_bytes(const std::string& option, const std::string& text);
// A budget in bytes ("40GiB"); nullopt for "" and "auto". Throws UserError that names the option.
std::optional<int64_t> parse_memory(const std::string& option, const std::string& text);

at::ScalarType parse_dtype(const std::string& name);  // fp32 | bf16 | fp64; else throws UserError

}  // namespace bough

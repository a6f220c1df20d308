// Options of the commands that compute: element type, threads, device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

#include "base/settings.h"
#include "cli/command.h"

namespace bough {

struct TorchOptions {
  std::string dtype;  // empty: fp32, on a GPU bf16
  std::optional<int64_t> threads;
  std::string device = "cpu";
};

// --dtype, --threads, --device.
void add_torch_options(Command& command, TorchOptions& options);

struct TorchSetup {
  at::ScalarType dtype;
  at::Device device;
};

// --batch-invariant, --no-batch-invariant.
void add_batch_invariant_flag(Command& command, std::optional<bool>& batch_invariant);

// Checks the options, sets the number of threads and installs the counting allocator. Call it before the
// first tensor is made. For device cuda, opens libbough_cuda.so beside the program or in ../lib. Throws
// UserError if an option is wrong, or if the library or a GPU is missing.
TorchSetup set_up_torch(const TorchOptions& options);

// Parses "4GiB" or "auto". Throws UserError that names the option.
Bytes parse_bytes(const std::string& option, const std::string& text);
// A budget in bytes ("40GiB"); nullopt for "" and "auto". Throws UserError that names the option.
std::optional<int64_t> parse_memory(const std::string& option, const std::string& text);

at::ScalarType parse_dtype(const std::string& name);  // fp32 | bf16 | fp64; else throws UserError

}  // namespace bough

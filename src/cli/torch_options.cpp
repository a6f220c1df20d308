#include "cli/torch_options.h"

#include <ATen/Parallel.h>

#include <string_view>

#include "base/build_id.h"
#include "base/error.h"
#include "base/log.h"
#include "cli/self_tests.h"
#include "kernels/common/cpu_allocator.h"
#include "kernels/common/cuda_library.h"
#include "run/run_settings.h"

namespace bough {

namespace {

// More threads than any machine has. A larger number is a typing error, refused before OpenMP tries to start
// the threads.
constexpr int64_t kMaxThreads = 4096;

}  // namespace

void add_torch_options(Command& command, TorchOptions& options, bool loads_model) {
  command.add_option("--dtype", options.dtype,
                     "Type of weights and activations: fp32 | bf16 | fp64\n(default: fp32, on a GPU bf16)");
  command.add_option("--threads", options.threads, "Threads to compute with (default: all cores)")
      .type_name("N");
  command.add_option("--device", options.device, "cpu | cuda");
  if (!loads_model) return;
  command.add_option("--router-dtype", options.router_dtype,
                     "Precision of routers' products, for a mixture of experts in bf16:\n"
                     "fp32 | model (rounded to bf16, as transformers does)");
  command.add_option("--head-dtype", options.head_dtype,
                     "Type of a bf16 model's logits: model (bf16) | fp32 (sums not rounded)");
}

void add_batch_invariant_flag(Command& command, std::optional<bool>& batch_invariant) {
  // CLI11 counts from 0: a flag bound to an optional would be false, not nullopt, if it is absent.
  command.add_flag_function(
      "--batch-invariant,!--no-batch-invariant",
      [&batch_invariant](int64_t count) { batch_invariant = count > 0; },
      "Log-probabilities do not depend on the batch: same bits in generation and training");
}

Bytes parse_bytes(const std::string& option, const std::string& text) {
  try {
    return Bytes::parse(text);
  } catch (const UserError& error) {
    throw UserError(str(option, ": ", error.what()));
  }
}

std::optional<int64_t> parse_memory(const std::string& option, const std::string& text) {
  if (text.empty()) return {};
  const Bytes bytes = parse_bytes(option, text);
  if (bytes.is_auto()) return {};
  return bytes.count;
}

at::ScalarType parse_dtype(const std::string& name) {
  if (name == "fp32") return at::kFloat;
  if (name == "bf16") return at::kBFloat16;
  if (name == "fp64") return at::kDouble;
  throw UserError(str("--dtype: got ", quoted(name), ", expected fp32, bf16 or fp64"));
}

TorchSetup set_up_torch(const TorchOptions& options, const TakeWarning& warn) {
  if (std::string_view(kernels_build_id()) != build_id())
    throw UserError(str("libbough_kernels.so is of another build: got build id ", kernels_build_id(),
                        ", expected ", build_id(),
                        ", that of this program; LD_LIBRARY_PATH may name the folder of another Bough: "
                        "unset it, or build all targets"));
  install_cpu_allocator();
  TorchSetup setup{parse_dtype(options.dtype.empty() ? dtype_on(options.device) : options.dtype), at::kCPU};
  if (options.router_dtype != "fp32" && options.router_dtype != "model")
    throw UserError(str("--router-dtype: got ", quoted(options.router_dtype), ", expected fp32 or model"));
  if (options.head_dtype != "fp32" && options.head_dtype != "model")
    throw UserError(str("--head-dtype: got ", quoted(options.head_dtype), ", expected model or fp32"));
  setup.precisions = {router_type_named(options.router_dtype), head_type_named(options.head_dtype)};
  if (options.threads) {
    check_at_least("--threads", *options.threads, 1, "leave it out for all cores");
    if (*options.threads > kMaxThreads)
      throw UserError(str("--threads: got ", *options.threads, ", expected at most ", kMaxThreads));
    at::set_num_threads(static_cast<int>(*options.threads));
  }
  if (options.device == "cuda") {
    if (const std::string warning = open_tested_cuda_library(); !warning.empty())
      warn ? warn(warning) : log_warning(warning);
    setup.device = at::kCUDA;
  } else if (options.device != "cpu") {
    throw UserError(str("--device: got ", quoted(options.device), ", expected cpu or cuda"));
  }
  return setup;
}

}  // namespace bough

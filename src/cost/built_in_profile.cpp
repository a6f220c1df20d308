// Profiles of GPUs from published rates: a roofline. A pass's matrix products are bound by FLOPs at a share of the
// tensor cores' dense peak, or by reading weights (forward, backward) and reading and writing their gradients
// (backward), whichever takes longer; all else by memory or by launches.
#include <algorithm>
#include <array>

#include "base/error.h"
#include "cost/device_profile.h"

namespace bough {

namespace {

struct Gpu {
  const char* name;
  const char* source;
  double bf16_flops, fp32_flops;  // dense peak; fp32 without TF32
  double bytes_per_second;        // of device memory
  int64_t memory_bytes;
  double matmul_efficiency;                                            // of a large product
  double attention_forward_efficiency, attention_backward_efficiency;  // of the peak, long causal sequences
};

// Peaks are those of NVIDIA's data sheets of the SXM modules. The share of it that large products reach is assumed:
// 0.65 where the power limit binds (H100, H200), 0.75 on A100. Attention is taken in the middle of what its papers
// report, since causal sequences of a few thousand tokens stay below the best: FlashAttention-2 (arXiv 2307.08691)
// on A100, 50-73% of the peak forward and up to 63% backward; FlashAttention-3 (arXiv 2407.08608) on H100, up to 75%
// forward, and backward 1.5 to 1.75 times FlashAttention-2's.
constexpr std::array kGpus = {
    Gpu{"h100",
        "NVIDIA H100 SXM data sheet (989 TFLOP/s dense bf16, 67 fp32, 3.35 TB/s, 80 GB); products at an "
        "assumed 65% "
        "of that; attention within what FlashAttention-3 reports; 5 us a launch",
        989e12, 67e12, 3.35e12, 80'000'000'000, 0.65, 0.6, 0.45},
    Gpu{"h200",
        "NVIDIA H200 SXM data sheet (989 TFLOP/s dense bf16, 67 fp32, 4.8 TB/s, 141 GB); products at an "
        "assumed 65% "
        "of that; attention within what FlashAttention-3 reports of H100; 5 us a launch",
        989e12, 67e12, 4.8e12, 141'000'000'000, 0.65, 0.6, 0.45},
    Gpu{"a100",
        "NVIDIA A100 80GB SXM data sheet (312 TFLOP/s dense bf16, 19.5 fp32, 2.0 TB/s, 80 GB); products at "
        "an "
        "assumed 75% of that; attention within what FlashAttention-2 reports; 5 us a launch",
        312e12, 19.5e12, 2.0e12, 80'000'000'000, 0.75, 0.6, 0.5},
};

// Of the peak bandwidth, streaming kernels reach about this.
constexpr double kBandwidthShare = 0.85;
// An eager layer launches about 14 kernels forward and 30 backward; each costs the CPU about this.
constexpr double kLaunch = 5e-6;
constexpr int kLaunchesForward = 14, kLaunchesBackward = 30;
constexpr double kAccumulatorBytes = 4;
// Tensor cores compute whole tiles of this many rows: smaller passes cost as much.
constexpr int64_t kSmallestTile = 64;
constexpr int64_t kLargestPass = 32768;

template <class Seconds>
CostCurve curve(Seconds&& seconds) {
  CostCurve curve;
  for (int64_t size = kSmallestTile; size <= kLargestPass; size *= 2) {
    curve.sizes.push_back(size);
    curve.values.push_back(seconds(static_cast<double>(size)));
  }
  return curve;
}

}  // namespace

DeviceProfile built_in_profile(std::string_view name, std::string_view dtype) {
  const auto gpu = std::find_if(kGpus.begin(), kGpus.end(), [&](const Gpu& g) { return g.name == name; });
  if (gpu == kGpus.end()) throw UserError(str("device: got ", quoted(name), ", expected h100, h200 or a100"));
  if (dtype != "bf16" && dtype != "fp32")
    throw UserError(str("dtype: got ", quoted(dtype), ", expected bf16 or fp32: there are no rates of ", name,
                        " for another one"));
  const bool bf16 = dtype == "bf16";
  const double element_bytes = bf16 ? 2 : 4;
  const double peak = bf16 ? gpu->bf16_flops : gpu->fp32_flops;
  const double flops = peak * gpu->matmul_efficiency;
  const double bytes = gpu->bytes_per_second * kBandwidthShare;
  DeviceProfile profile;
  profile.name = gpu->name;
  profile.source = gpu->source;
  profile.dtype = dtype;
  profile.memory_bytes = gpu->memory_bytes;
  profile.attention = DeviceProfile::Attention::kFused;
  profile.launches_overlap = true;
  // One FLOP a token is half a weight. Backward reads it once more and reads and writes its gradient.
  const double weight = element_bytes / 2, gradient = 2 * kAccumulatorBytes / 2;
  profile.linear_forward = curve([&](double tokens) { return std::max(tokens / flops, weight / bytes); });
  profile.linear_backward =
      curve([&](double tokens) { return std::max(2 * tokens / flops, (weight + gradient) / bytes); });
  profile.head_forward = profile.linear_forward;
  profile.head_backward = profile.linear_backward;
  profile.elementwise_forward = curve([&](double tokens) { return tokens * element_bytes / bytes; });
  profile.elementwise_backward = curve([&](double tokens) { return 2 * tokens * element_bytes / bytes; });
  // Backward computes five products for the two of the forward pass.
  profile.attention_forward.by_queries =
      curve([&](double queries) { return queries / (peak * gpu->attention_forward_efficiency); });
  profile.attention_backward.by_queries =
      curve([&](double queries) { return 2.5 * queries / (peak * gpu->attention_backward_efficiency); });
  profile.seconds_per_layer_forward = kLaunchesForward * kLaunch;
  profile.seconds_per_layer_backward = kLaunchesBackward * kLaunch;
  profile.seconds_per_pass_forward = 10 * kLaunch;
  profile.seconds_per_pass_backward = 40 * kLaunch;  // the head and the loss, which wait for each other
  return profile;
}

}  // namespace bough

// Measures a device's DeviceProfile: the cost model's seconds per FLOP, element or key, with the code that
// training runs.
//
// All cells are timed on a decoder of two layers, for passes of 2 to 2,048 tokens (GPU: 16,384):
//   CPU: width 640, 8 query and 4 key/value heads of 96, feed-forward 1,792, vocabulary 3,072
//   GPU: width 4,096, 32 query and 8 key/value heads of 128, feed-forward 12,288, vocabulary 32,768
// The decoder exists in several copies with separate weights, which the runs use in turn. So small passes
// find their weights no warmer in the caches than in a model of real size. The measurements:
//
//   linear       `linear` forward and backward over the layers' matrices
//   attention    tree attention of one path, of many branches, and of one path on a prefix of 1,000 tokens;
//                for heads of 32 and 128, whose difference gives the cost of a score's softmax
//   head         chunks of logits, log-probabilities, their gradients
//   elementwise  the rest of a whole pass through the executor: norms, rotary embedding, SwiGLU, residuals,
//                cache misses
//   constants    passes of two tokens through models of width 16; the fixed cost of a layer's products, from
//                two widths at 16 tokens
//
// The measurements take turns, several times. So a burst of load from other programs hits only a few samples,
// and samples far above the rest are capped. If other programs keep some cores busy all the time, the curves
// describe the speed of the remaining cores.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <functional>

#include "cost/device_profile.h"

namespace bough {

// The name of dtype in settings, profiles and reports: fp32, bf16 or fp64. Throws InternalError for others.
const char* dtype_name(at::ScalarType dtype);
// The inverse. `dtype` must have been checked: fp32, bf16 or fp64.
at::ScalarType scalar_type_of(const std::string& dtype);

// The kernels that the device uses for dtype. On a CPU they depend on libtorch's current number of threads,
// on a GPU on the kernels that are left out (kernels/common/cuda_library.h).
DeviceKernels kernels_of(c10::Device device, at::ScalarType dtype);

// A round gives every cell one turn (CalibrationCells::measure). Rounds are run until `seconds` have passed
// since measure() began, but at least `min_rounds` and at most `max_rounds`. The warm-up round takes time but
// is not counted.
struct CalibrationEffort {
  double seconds = 6;
  int min_rounds = 3;
  int max_rounds = 7;
  // Tokens; 0: 2,048, on a GPU largest_pass_within() half of the free memory. Larger passes are extrapolated.
  int64_t largest_pass = 0;
  std::function<bool()> stop = {};  // called between measurements; if true, calibrate() throws Interrupted
  bool show_progress = false;
};

// The tokens of the largest pass that is measured on a GPU with this many bytes for the measurement: 2,048 to
// 16,384. The cells' inputs, logits and activations take about 1 MiB per token of the largest pass.
int64_t largest_pass_within(int64_t bytes);

// dtype: fp32, bf16 or fp64. Uses libtorch's current number of threads, and the CPU allocator of
// training (kernels/common/cpu_allocator.h).
DeviceProfile calibrate(c10::Device device, at::ScalarType dtype, const CalibrationEffort& effort = {});

}  // namespace bough

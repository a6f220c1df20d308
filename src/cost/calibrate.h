// Measures a device's DeviceProfile: what the cost model's units of work cost here, with the code that
// training runs.
//
// Everything is timed on a decoder of two layers of its own shape (on a CPU width 640, 8 query and 4
// key/value heads of 96, feed-forward 1,792, vocabulary 3,072, on a GPU width 4,096, 32 and 8 heads of 128,
// feed-forward 12,288, vocabulary 32,768; copies with weights of their own, so that small passes find
// them no warmer in the caches than in a model of real size), for passes of 2 to 2,048 tokens, on a GPU
// 16,384:
//
//   linear       `linear` forward and backward over the layers' matrices
//   attention    tree attention of one path, of many pieces, and over a stack of 1,000 rows; heads of 32 and
//                128, from whose difference follows what a score's softmax costs beside its products
//   head         chunks of logits, log-probabilities, their gradients
//   elementwise  what is left of a whole pass through the executor: norms, rotary embedding, SwiGLU,
//                residuals, memory that the caches do not hold
//   constants    passes of two tokens through models of width 16; what a layer's products cost whatever their
//                size, from two widths at 16 tokens
//
// All of it is measured in turns, several times, so that a burst of other programs' work falls on one sample
// of many, and a run far above the others counts little. On a machine whose cores are busy all the time the
// curves are those of what is left of it.
#pragma once

#include <c10/core/ScalarType.h>

#include <functional>

#include "cost/device_profile.h"

namespace bough {

// fp32, bf16 or fp64: as settings, profiles and reports name it. InternalError for another one.
const char* dtype_name(at::ScalarType dtype);

// How this CPU, with libtorch's present number of threads, or this GPU computes dtype.
DeviceKernels kernels_of(c10::Device device, at::ScalarType dtype);

// How long: at least `min_rounds` turns, then until `seconds` have passed, or `max_rounds`.
struct CalibrationEffort {
  double seconds = 6;
  int min_rounds = 3;
  int max_rounds = 7;
  int64_t largest_pass = 0;  // tokens, 0: 2,048, on a GPU 16,384; beyond it the curves go on in proportion
  std::function<bool()> stop = {};  // looked at between pieces of work: Interrupted, no profile
  bool show_progress = false;
};

// dtype: fp32, bf16 or fp64. Uses libtorch's present number of threads. Makes our CPU allocator libtorch's.
DeviceProfile calibrate(c10::Device device, at::ScalarType dtype, const CalibrationEffort& effort = {});

}  // namespace bough

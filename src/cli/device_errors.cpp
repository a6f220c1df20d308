#include "cli/device_errors.h"

#include <array>
#include <cctype>

namespace bough {

namespace {

struct Kind {
  const char* text;  // in lower case
  const char* remedy;
};

constexpr const char* kMemory =
    "the GPU's memory is full: `bough doctor` names other processes on it, `bough plan --run CONFIG "
    "--device NAME` what the run takes; a smaller rollout.kv_memory or actor.mb_spec.memory leaves more "
    "room";

// The first kind whose text occurs counts. CUDA's texts: cudaGetErrorString. NCCL's: ncclGetErrorString and
// the messages of its asynchronous errors.
constexpr std::array kKinds = {
    Kind{"cuda out of memory", kMemory},
    Kind{"cuda error: out of memory", kMemory},
    Kind{"ecc error",
         "the GPU's memory has an error that it cannot correct: `dmesg` has a line with Xid 48, 63 or 94; "
         "reset the GPU or use another one"},
    Kind{"gpu has fallen off the bus",
         "the GPU is lost: `dmesg` has a line with Xid 79; restart the machine"},
    Kind{"no cuda-capable device", "the GPU is gone or hidden: see `bough doctor` and CUDA_VISIBLE_DEVICES"},
    Kind{"illegal memory access",
         "a kernel or the GPU has a fault: look for Xid in `dmesg`, run `scripts/gpu_check OUT --parts ops`, "
         "and send its report"},
    Kind{"unspecified launch failure",
         "a kernel or the GPU has a fault: look for Xid in `dmesg`, run `scripts/gpu_check OUT --parts ops`, "
         "and send its report"},
    Kind{"device-side assert",
         "an index was out of range in a kernel of libtorch: run again with CUDA_LAUNCH_BLOCKING=1, and send "
         "the message"},
    Kind{"misaligned address",
         "a kernel has a fault: run `scripts/gpu_check OUT --parts ops`, and send its report"},
    Kind{
        "no kernel image",
        "the libraries were not compiled for this GPU: `bough doctor` names its compute capability and those "
        "of the library"},
    Kind{"driver version is insufficient", "install driver 580 or newer (`bough doctor`)"},
    Kind{"nccl",
         "the ranks lost each other: another rank ended (its own message says why), or the network or "
         "/dev/shm failed; NCCL_DEBUG=INFO shows which"},
    Kind{"cuda error", "see `bough doctor`, and `dmesg` for lines with Xid"},
};

}  // namespace

std::string remedy_for_device_error(std::string_view text) {
  std::string lower;
  for (const char c : text) lower += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  for (const Kind& kind : kKinds)
    if (lower.find(kind.text) != std::string::npos) return kind.remedy;
  return {};
}

}  // namespace bough

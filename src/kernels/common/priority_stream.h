// A stream of high priority for a thread that must not wait behind another thread's work on the same GPU.
#pragma once

#include <c10/core/Device.h>

namespace bough {

// From now on, this thread's work on the device has a stream of its own, before other streams' queued work.
// First waits until all work on the device is done, so that tensors of other threads are complete. Later, a
// thread that reads what another thread's stream writes must wait for it: both sides of CopiedWeights do, and
// so do checkpoints. Does nothing for a CPU.
void use_priority_stream(c10::Device device);

}  // namespace bough

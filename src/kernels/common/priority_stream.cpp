#include "kernels/common/priority_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "kernels/common/device.h"

namespace bough {

void use_priority_stream(c10::Device device) {
  if (device.is_cpu()) return;
  synchronize(device);
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Device current = device.has_index() ? device : guard.getDevice();
  guard.exchangeStream(guard.getStreamFromGlobalPool(current, /*isHighPriority=*/true));
}

}  // namespace bough

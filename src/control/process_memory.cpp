#include "control/process_memory.h"

#include <sys/resource.h>

namespace bough {

int64_t peak_process_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;  // Linux counts it in KiB
}

}  // namespace bough

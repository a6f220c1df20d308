// What this process takes of the machine's memory.
#pragma once

#include <cstdint>

namespace bough {

// The largest resident set of the process since it began, in bytes.
int64_t peak_process_memory();

}  // namespace bough

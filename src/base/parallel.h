// A loop over independent items on several threads, for work without torch before a run begins.
#pragma once

#include <cstddef>
#include <functional>

namespace bough {

// Calls work(0) ... work(count - 1), each once, on up to 16 threads. Rethrows the exception of the lowest
// index; items after it may be left out.
void parallel_for(size_t count, const std::function<void(size_t)>& work);

}  // namespace bough

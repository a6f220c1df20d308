// A run's state as a few lines of text, for `bough watch`: what it does, curves as rows of blocks, failures.
#pragma once

#include <string>

#include "report/run_follower.h"

namespace bough {

// At most `columns` wide. Without curves that the run does not have.
std::string watch_text(const RunFollower& run, int columns);
// Whether the run writes no more: it has ended, or its process is gone.
bool has_ended(const RunFollower& run);

}  // namespace bough

// One line of a rollout file: text to Trajectory and back.
//
// Lists of numbers, which are nearly all of a file, are read straight from the text: a JSON library would
// build a 16-byte node a number (90 MB/s; 350 this way) and could not say which number of a list is out of
// range. Every other value goes through Json.
#pragma once

#include <string>
#include <string_view>

#include "data/rollout_file.h"

namespace bough {

// `line`: one JSON object. UserErrors begin with `where` ("FILE, line 3"), then name the field and the
// position in its list, counted from 0.
Trajectory parse_rollout_line(std::string_view line, const std::string& where,
                           const RolloutReadOptions& options);

// The line without its end, floats in the fewest digits that read back as the same float. Invariants of
// Trajectory (lengths, finite numbers) are checked.
void append_rollout_line(std::string& out, const Trajectory& rollout);

}  // namespace bough

// The style and the script of report.html. Both are constants of the source code and never contain data of a
// run.
#pragma once

namespace bough {

extern const char* const kPageStyle;
extern const char* const kPageScript;

}  // namespace bough

// The style and the script of report.html. Both are constants: no data of a run is ever put into them.
#pragma once

namespace bough {

extern const char* const kPageStyle;
extern const char* const kPageScript;

}  // namespace bough

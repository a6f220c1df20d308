// The id of a build: equal in the program and in the libraries that it opens at run time, if they were
// compiled from the same sources with the same options for the same torch (cmake/build_id.cmake).
#pragma once

namespace bough {

// The id of the program or shared library that contains the caller, 16 hexadecimal digits. Hidden, because
// the dynamic linker would otherwise answer every library's call with the program's function.
[[gnu::visibility("hidden")]] const char* build_id();

}  // namespace bough

// Opens libraries of Bough that the program does not link: libbough_cuda.so, libbough_nccl.so and
// libbough_mpi.so. Their classes and functions must match the program's, so another build is refused.
#pragma once

#include <filesystem>
#include <string>

namespace bough {

std::filesystem::path program_folder();  // of this process's program

// Searches the program's folder, then the folder lib beside it, then that of the library that contains this
// code (in Python: libbough_kernels.so). Returns an empty path if nothing is found.
std::filesystem::path find_run_time_library(const std::string& name);

// Returns the build id in a library's file, which is not opened; an empty text if the file has none. Throws
// IoError if the file cannot be read.
std::string build_id_of(const std::filesystem::path& library);

struct RunTimeLibrary {
  std::filesystem::path path;
  std::string build_id;  // that of the caller: bough::build_id()
  std::string purpose;   // begins messages, such as "several ranks"
  std::string remedy;    // if the system refuses to open the library, such as "install Open MPI's libraries"
  std::string rebuild;   // if it is of another build: the targets to build, such as "bough and bough_mpi"
};

// Opens a library for the rest of the process, with RTLD_GLOBAL: libraries that it or other code opens later
// find its symbols. Throws UserError if it cannot be opened, or if its build id is another one. Code of a
// library of another build never runs.
void* open_run_time_library(const RunTimeLibrary& library);

}  // namespace bough

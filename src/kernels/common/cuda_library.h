// libbough_cuda.so, which holds the CUDA kernels and brings libtorch_cuda with it: opened when a GPU is asked
// for, so that all else starts fast and runs where there is neither CUDA nor a driver.
#pragma once

#include <filesystem>

namespace bough {

// Opens the library beside the program or in ../lib, and registers its kernels. Call it before the first
// tensor: libtorch asks once whether there is CUDA, and keeps the answer. Idempotent. UserError where the
// library is missing or cannot be opened, or where libtorch finds no GPU.
void open_cuda_library();

// The library's file, or an empty path where none is installed.
std::filesystem::path find_cuda_library();

}  // namespace bough

# libbough_cuda.so: the CUDA kernels, compiled where nvcc is found, never required. The program opens it at run time
# (src/kernels/common/cuda_library.h), so nothing links it and no part of CUDA is needed to start.
set(BOUGH_HAS_CUDA OFF)
if(BOUGH_CUDA AND NOT BOUGH_SANITIZE)  # no sanitizer checks device code, and this one would only slow its build
  include(CheckLanguage)
  set(CMAKE_CUDA_STANDARD 20)
  # Ampere by machine code, and by PTX what comes after it; Hopper by the code of its own architecture.
  set(CMAKE_CUDA_ARCHITECTURES 80 90a-real CACHE STRING "GPUs to compile for, as CMake writes them")
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(BOUGH_HAS_CUDA ON)
  endif()
endif()
if(NOT BOUGH_HAS_CUDA)
  message(STATUS "No CUDA library: ${CMAKE_CURRENT_LIST_FILE} found no nvcc, or BOUGH_CUDA is off")
  return()
endif()

# One CUDA runtime in the process: the wheel's, which libtorch_cuda opens, not the toolkit's.
get_filename_component(site_packages ${BOUGH_TORCH_DIR} DIRECTORY)
file(GLOB cudart ${site_packages}/nvidia/cu13/lib/libcudart.so.*)
if(NOT cudart)
  message(FATAL_ERROR "no libcudart.so in ${site_packages}/nvidia/cu13/lib: run scripts/setup, or set BOUGH_CUDA=OFF")
endif()

# The kernels do not include torch, and take nvcc's own headers of CUDA; nvcc does not know the options that are
# set for all C++ files.
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*.cu)
add_library(bough_cuda_kernels OBJECT ${cuda_sources})
target_include_directories(bough_cuda_kernels PRIVATE ${CMAKE_SOURCE_DIR}/src)
set_target_properties(bough_cuda_kernels PROPERTIES
  COMPILE_OPTIONS "-O3;--expt-relaxed-constexpr;-Xcompiler=-Wall" CUDA_RUNTIME_LIBRARY Shared)

add_library(bough_cuda SHARED ${CMAKE_SOURCE_DIR}/src/kernels/common/cuda_ops.cpp $<TARGET_OBJECTS:bough_cuda_kernels>)
set_target_properties(bough_cuda PROPERTIES LINKER_LANGUAGE CXX CUDA_RUNTIME_LIBRARY None)
target_include_directories(bough_cuda SYSTEM PRIVATE ${site_packages}/nvidia/cu13/include)
target_link_libraries(bough_cuda PRIVATE
  bough_kernels ${BOUGH_TORCH_DIR}/lib/libtorch_cuda.so ${BOUGH_TORCH_DIR}/lib/libc10_cuda.so ${cudart})

# libbough_cuda.so: the CUDA kernels. Optional: compiled if nvcc is found. The program opens this library at
# run time (src/kernels/common/cuda_library.h). Nothing links the library, so the program starts without CUDA.
if(NOT BOUGH_CUDA OR BOUGH_SANITIZE)  # sanitizers check host code only
  return()
endif()
if(NOT EXISTS ${BOUGH_TORCH_DIR}/lib/libtorch_cuda.so)
  message(STATUS "No CUDA library: ${BOUGH_TORCH_DIR} is a torch without CUDA")
  return()
endif()
include(CheckLanguage)
# Machine code for A100 and H100. On later GPUs the driver compiles the A100's PTX when the library is opened.
set(CMAKE_CUDA_ARCHITECTURES 80 90a-real CACHE STRING "GPUs to compile for, as CMake writes them")
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(STATUS "No CUDA library: no nvcc on the PATH or in CMAKE_CUDA_COMPILER")
  return()
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
# Code compiled by nvcc calls the CUDA runtime of nvcc's major version. The process has the wheel's runtime.
file(STRINGS ${BOUGH_TORCH_DIR}/version.py cuda_line REGEX "^cuda: ")
string(REGEX MATCH "[0-9]+" torch_cuda_major "${cuda_line}")
string(REGEX MATCH "^[0-9]+" nvcc_major "${CMAKE_CUDA_COMPILER_VERSION}")
if(NOT nvcc_major EQUAL torch_cuda_major)
  message(WARNING "No CUDA library: ${CMAKE_CUDA_COMPILER} is of CUDA ${CMAKE_CUDA_COMPILER_VERSION}, "
    "the torch wheel of CUDA ${torch_cuda_major}; install nvcc ${torch_cuda_major}, set CMAKE_CUDA_COMPILER")
  return()
endif()

# The kernels do not include torch and use nvcc's own CUDA headers. nvcc does not know the options that are
# set for all C++ files.
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*.cu)
add_library(bough_cuda_kernels OBJECT ${cuda_sources})
target_include_directories(bough_cuda_kernels PRIVATE ${CMAKE_SOURCE_DIR}/src)
set_target_properties(bough_cuda_kernels PROPERTIES
  COMPILE_OPTIONS "-O3;--expt-relaxed-constexpr;-Xcompiler=-Wall" CUDA_RUNTIME_LIBRARY Shared)

# The process has one CUDA runtime and one cuBLAS: those of the wheel, loaded by libtorch_cuda. This library
# does not link them: their folder is found only through libtorch_cuda. So the library also opens with a torch
# in another location than at build time. The headers come from the wheel, too.
get_filename_component(site_packages ${BOUGH_TORCH_DIR} DIRECTORY)
file(GLOB_RECURSE cuda_ops CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*cuda_ops.cpp)
add_library(bough_cuda SHARED ${cuda_ops} $<TARGET_OBJECTS:bough_cuda_kernels>)
set_target_properties(bough_cuda PROPERTIES LINKER_LANGUAGE CXX CUDA_RUNTIME_LIBRARY None)
target_include_directories(bough_cuda SYSTEM PRIVATE ${site_packages}/nvidia/cu13/include)
target_link_libraries(bough_cuda PRIVATE
  bough_build_id bough_kernels ${BOUGH_TORCH_DIR}/lib/libtorch_cuda.so ${BOUGH_TORCH_DIR}/lib/libc10_cuda.so)

# libbough_nccl.so: collectives between GPUs (src/comm/communicator.h). Built if the wheel has NCCL. The
# process has already loaded this library's dependencies when it opens the library.
find_library(BOUGH_NCCL NAMES libnccl.so.2 PATHS ${site_packages}/nvidia/nccl/lib NO_DEFAULT_PATH)
find_library(BOUGH_CUDART NAMES libcudart.so.13 PATHS ${site_packages}/nvidia/cu13/lib NO_DEFAULT_PATH)
if(NOT BOUGH_NCCL OR NOT BOUGH_CUDART)
  message(WARNING "No NCCL library: no libnccl.so.2 and libcudart.so.13 in ${site_packages}/nvidia. This build "
    "refuses several ranks on GPUs; install nvidia-nccl-cu13, as the torch wheel requires it")
  return()
endif()
add_library(bough_nccl SHARED ${CMAKE_SOURCE_DIR}/src/comm/nccl_communicator.cpp)
set_target_properties(bough_nccl PROPERTIES LINKER_LANGUAGE CXX CUDA_RUNTIME_LIBRARY None)
target_include_directories(bough_nccl SYSTEM PRIVATE
  ${site_packages}/nvidia/cu13/include ${site_packages}/nvidia/nccl/include)
target_link_libraries(bough_nccl PRIVATE bough_build_id bough_comm ${BOUGH_NCCL} ${BOUGH_CUDART})
# The program opens both libraries by name. Whoever builds the CUDA library needs this one beside it.
add_dependencies(bough_cuda bough_nccl)

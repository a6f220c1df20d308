# libtorch from the pinned torch wheel, imported by hand: find_package(Torch) of a CUDA wheel fails if no CUDA
# toolkit is installed.
file(GLOB default_torch ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
set(BOUGH_TORCH_DIR "${default_torch}" CACHE PATH "The folder of the torch wheel (site-packages/torch)")
if(NOT EXISTS ${BOUGH_TORCH_DIR}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "torch not found in '${BOUGH_TORCH_DIR}': run scripts/setup, or set BOUGH_TORCH_DIR")
endif()
file(STRINGS ${BOUGH_TORCH_DIR}/version.py version_line REGEX "^__version__")
if(NOT version_line MATCHES "2\\.(11|15)\\.")
  message(FATAL_ERROR "torch 2.11 or 2.15 expected in ${BOUGH_TORCH_DIR}, found: ${version_line}")
endif()
# scripts/bundle and the Python package read the version of the build from this file.
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/torch_version CONTENT "2.${CMAKE_MATCH_1}\n")

add_library(bough_torch INTERFACE)
target_include_directories(bough_torch SYSTEM INTERFACE
  ${BOUGH_TORCH_DIR}/include ${BOUGH_TORCH_DIR}/include/torch/csrc/api/include)
# at::parallel_for is parallel only in files compiled with OpenMP. At run time, both use torch's own libgomp.
target_compile_options(bough_torch INTERFACE -fopenmp)
target_link_options(bough_torch INTERFACE -Wl,-rpath,${BOUGH_TORCH_DIR}/lib -Wl,--no-as-needed)
if(BOUGH_SANITIZE STREQUAL thread)  # must be linked before libgomp
  add_library(bough_tsan_gomp SHARED tests/tsan/gomp.cpp)
  target_link_libraries(bough_torch INTERFACE bough_tsan_gomp)
endif()
target_link_libraries(bough_torch INTERFACE
  ${BOUGH_TORCH_DIR}/lib/libtorch_cpu.so ${BOUGH_TORCH_DIR}/lib/libc10.so ${BOUGH_TORCH_DIR}/lib/libgomp.so.1)

# The CUDA kernels on a CPU (docs/cuda_emulation.md): <build>/cuda_emulation/kernels_test, and beside it a
# libbough_cuda.so that clang compiles with sanitizers from the kernels, their ops and tests/cuda_emulation. The objects
# of the tests are those of <build>/test/kernels_test. Like libtorch, they have no sanitizers.
if(NOT BOUGH_CUDA_EMULATION)
  return()
endif()
find_program(BOUGH_CLANG clang++)
set(remedy "run scripts/setup, or leave the CUDA emulation out with -DBOUGH_CUDA_EMULATION=OFF")
if(NOT BOUGH_CLANG)
  message(FATAL_ERROR "No clang++, which compiles the CUDA kernels for the CPU: ${remedy}")
endif()
if(NOT BOUGH_CLANG_SANITIZES)
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/cuda_emulation/probe.cpp CONTENT "int main() {}\n")
  execute_process(COMMAND ${BOUGH_CLANG} -fsanitize=address,undefined ${CMAKE_BINARY_DIR}/cuda_emulation/probe.cpp
    -o ${CMAKE_BINARY_DIR}/cuda_emulation/probe ERROR_VARIABLE error RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${BOUGH_CLANG} has no sanitizers (Debian: libclang-rt-dev): ${remedy}\n${error}")
  endif()
  set(BOUGH_CLANG_SANITIZES ON CACHE INTERNAL "clang++ links programs with sanitizers")
endif()

set(emulation_source ${CMAKE_SOURCE_DIR}/tests/cuda_emulation)
set(emulation_flags -std=c++20 -fPIC -g1 -Wall -Wno-unknown-pragmas -Wno-pass-failed -fno-strict-aliasing
  -fmacro-prefix-map=${CMAKE_SOURCE_DIR}/= -I${emulation_source} -I${emulation_source}/include -I${CMAKE_SOURCE_DIR}/src
  -isystem ${BOUGH_TORCH_DIR}/include -isystem ${BOUGH_TORCH_DIR}/include/torch/csrc/api/include)
set(emulation_sanitizers -O1 -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined
  -fno-omit-frame-pointer)

# Adds commands that compile the sources with clang. `objects`: the variable that gets the object files.
function(bough_emulation_objects variant objects)
  cmake_parse_arguments(ARG "" "" "SOURCES;FLAGS" ${ARGN})
  set(outputs "")
  foreach(source ${ARG_SOURCES})
    cmake_path(GET source FILENAME name)
    set(object ${CMAKE_BINARY_DIR}/${variant}/objects/${name}.o)
    add_custom_command(OUTPUT ${object}
      COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${BOUGH_CLANG} ${emulation_flags} ${ARG_FLAGS} -MD -MF ${object}.d
        -x c++ -c ${source} -o ${object}
      DEPENDS ${source} DEPFILE ${object}.d COMMENT "Compiling ${name} for the CPU" VERBATIM)
    list(APPEND outputs ${object})
  endforeach()
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/${variant}/objects)
  set(${objects} ${outputs} PARENT_SCOPE)
endfunction()

# Adds a target `variant` that builds <build>/<variant>/kernels_test and libbough_cuda.so beside it. With `ALL`,
# the target is built by default.
function(bough_emulation variant)
  cmake_parse_arguments(ARG "ALL" "" "SOURCES;DEFINITIONS;FLAGS;KERNEL_FLAGS;LINK_FLAGS" ${ARGN})
  set(folder ${CMAKE_BINARY_DIR}/${variant})
  set(all "")
  if(ARG_ALL)
    set(all ALL)
  endif()
  file(GLOB_RECURSE kernels CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*.cu)
  # One file includes all ops: most of their compile time goes into the same headers. cuBLAS and CUDA graphs have no
  # stand-in.
  file(GLOB_RECURSE ops CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*cuda_ops.cpp)
  list(FILTER ops EXCLUDE REGEX "/(matrix_product|cuda_graph)_cuda_ops.cpp$")
  list(TRANSFORM ops REPLACE ".+" "#include \"\\0\"\n" OUTPUT_VARIABLE includes)
  string(JOIN "" includes ${includes})
  file(CONFIGURE OUTPUT ${folder}/ops.cpp CONTENT "${includes}" @ONLY)
  bough_emulation_objects(${variant} kernel_objects SOURCES ${kernels} FLAGS ${ARG_FLAGS} ${ARG_KERNEL_FLAGS})
  bough_emulation_objects(${variant} op_objects FLAGS ${ARG_FLAGS} SOURCES ${folder}/ops.cpp)
  bough_emulation_objects(${variant} objects FLAGS -O3 ${ARG_DEFINITIONS} SOURCES ${ARG_SOURCES}
    ${emulation_source}/block.cpp ${emulation_source}/memory.cpp ${emulation_source}/mma.cpp
    ${emulation_source}/device.cpp)
  list(APPEND objects ${kernel_objects} ${op_objects})
  bough_emulation_objects(${variant} main_object FLAGS ${ARG_FLAGS} SOURCES ${emulation_source}/main.cpp)

  set(torch_libs ${BOUGH_TORCH_DIR}/lib/libtorch_cpu.so ${BOUGH_TORCH_DIR}/lib/libc10.so
    ${BOUGH_TORCH_DIR}/lib/libgomp.so.1)
  set(libs $<TARGET_FILE:bough_kernels> $<TARGET_FILE:bough_base> ${torch_libs})
  add_custom_command(OUTPUT ${folder}/libbough_cuda.so
    COMMAND ${BOUGH_CLANG} ${ARG_FLAGS} -shared ${objects} $<TARGET_OBJECTS:bough_build_id> ${ARG_LINK_FLAGS} ${libs}
      -Wl,-T,${emulation_source}/shared_memory.ld -o ${folder}/libbough_cuda.so
    DEPENDS ${objects} $<TARGET_OBJECTS:bough_build_id> ${emulation_source}/shared_memory.ld bough_kernels bough_base
    COMMENT "Linking ${variant}/libbough_cuda.so" VERBATIM COMMAND_EXPAND_LISTS)
  add_custom_command(OUTPUT ${folder}/kernels_test
    COMMAND ${BOUGH_CLANG} ${ARG_FLAGS} ${main_object} $<TARGET_OBJECTS:kernels_test> -rdynamic -Wl,--no-as-needed
      -Wl,-rpath,${BOUGH_TORCH_DIR}/lib,-rpath,${CMAKE_BINARY_DIR}/lib ${libs} $<TARGET_FILE:GTest::gtest>
      -lyaml-cpp -lspdlog -lfmt -o ${folder}/kernels_test
    DEPENDS ${main_object} $<TARGET_OBJECTS:kernels_test> bough_kernels bough_base
    COMMENT "Linking ${variant}/kernels_test" VERBATIM COMMAND_EXPAND_LISTS)
  add_custom_target(${variant} ${all} DEPENDS ${folder}/libbough_cuda.so ${folder}/kernels_test)
endfunction()

bough_emulation(cuda_emulation ALL FLAGS ${emulation_sanitizers} DEFINITIONS -DBOUGH_EMULATION_ASAN)
# The race detector instead of the sanitizers. The optimiser must not join accesses of different threads' bytes.
bough_emulation(cuda_races FLAGS -O1 DEFINITIONS -DBOUGH_EMULATION_RACES SOURCES ${emulation_source}/races.cpp
  KERNEL_FLAGS -fsanitize=thread -fno-threadsafe-statics -fno-vectorize -fno-slp-vectorize
  LINK_FLAGS -Wl,--wrap=memcpy,--wrap=memset)

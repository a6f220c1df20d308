# An emulated CUDA device (docs/cuda_emulation.md): in <build>/cuda_emulation a libbough_cuda.so that clang compiles with
# sanitizers from the kernels, their ops and tests/cuda_emulation, and beside it test programs and `bough`, which open
# it. The programs' own objects are those of <build>/test and <build>/bin. Like libtorch, they have no sanitizers.
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
set(emulation_flags -std=c++20 -fPIC -g1 -DNDEBUG -Wall -Wno-unknown-pragmas -Wno-pass-failed -fno-strict-aliasing
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

# Adds a command that links <build>/<variant>/<program> from the objects of the target `program` and of `ARGN`. The
# program is the target's, but clang links it, with its sanitizers.
function(bough_emulated_program variant flags program)
  set(modules net text data report tree plan env engine control serve comm models algo train cost rollout run tinker cli)
  list(TRANSFORM modules PREPEND bough_)
  set(archives ${modules})
  list(TRANSFORM archives REPLACE ".+" "$<TARGET_FILE:\\0>")
  set(output ${CMAKE_BINARY_DIR}/${variant}/${program})
  add_custom_command(OUTPUT ${output}
    COMMAND ${BOUGH_CLANG} ${flags} ${ARGN} $<TARGET_OBJECTS:${program}> -rdynamic -Wl,--no-as-needed
      -Wl,-rpath,${BOUGH_TORCH_DIR}/lib,-rpath,${CMAKE_BINARY_DIR}/lib -Wl,--start-group ${archives} -Wl,--end-group
      ${emulation_libs} $<TARGET_FILE:GTest::gtest> -lyaml-cpp -lspdlog -lfmt -lutf8proc -lpcre2-8 -lzstd -o ${output}
    DEPENDS ${ARGN} $<TARGET_OBJECTS:${program}> ${modules} bough_kernels bough_base
    COMMENT "Linking ${variant}/${program}" VERBATIM COMMAND_EXPAND_LISTS)
endfunction()

# Adds a target `variant` that builds libbough_cuda.so in <build>/<variant>, and beside it the PROGRAMS, which open it.
# With `ALL`, the target is built by default.
function(bough_emulation variant)
  cmake_parse_arguments(ARG "ALL" "" "SOURCES;DEFINITIONS;FLAGS;KERNEL_FLAGS;LINK_FLAGS;PROGRAMS" ${ARGN})
  set(folder ${CMAKE_BINARY_DIR}/${variant})
  set(all "")
  if(ARG_ALL)
    set(all ALL)
  endif()
  file(GLOB_RECURSE kernels CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*.cu)
  # One file includes all ops: most of their compile time goes into the same headers. cuBLAS has no stand-in.
  file(GLOB_RECURSE ops CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*cuda_ops.cpp)
  list(FILTER ops EXCLUDE REGEX "/matrix_product_cuda_ops.cpp$")
  list(TRANSFORM ops REPLACE ".+" "#include \"\\0\"\n" OUTPUT_VARIABLE includes)
  string(JOIN "" includes ${includes})
  file(CONFIGURE OUTPUT ${folder}/ops.cpp CONTENT "${includes}" @ONLY)
  bough_emulation_objects(${variant} kernel_objects SOURCES ${kernels} FLAGS ${ARG_FLAGS} ${ARG_KERNEL_FLAGS})
  bough_emulation_objects(${variant} op_objects FLAGS ${ARG_FLAGS} SOURCES ${folder}/ops.cpp)
  set(parts block device dispatch host_order memory mma pinned_memory recording)
  list(TRANSFORM parts REPLACE ".+" "${emulation_source}/\\0.cpp")
  bough_emulation_objects(${variant} objects FLAGS -O3 ${ARG_DEFINITIONS} SOURCES ${ARG_SOURCES} ${parts})
  list(APPEND objects ${kernel_objects} ${op_objects})
  bough_emulation_objects(${variant} with_all SOURCES ${emulation_source}/sanitizers.cpp ${emulation_source}/host_threads.cpp)
  bough_emulation_objects(${variant} main FLAGS ${ARG_FLAGS} SOURCES ${emulation_source}/main.cpp)

  set(emulation_libs $<TARGET_FILE:bough_kernels> $<TARGET_FILE:bough_base> ${BOUGH_TORCH_DIR}/lib/libtorch_cpu.so
    ${BOUGH_TORCH_DIR}/lib/libc10.so ${BOUGH_TORCH_DIR}/lib/libgomp.so.1)
  add_custom_command(OUTPUT ${folder}/libbough_cuda.so
    COMMAND ${BOUGH_CLANG} ${ARG_FLAGS} -shared ${objects} $<TARGET_OBJECTS:bough_build_id> ${ARG_LINK_FLAGS}
      ${emulation_libs} -Wl,-T,${emulation_source}/shared_memory.ld -o ${folder}/libbough_cuda.so
    DEPENDS ${objects} $<TARGET_OBJECTS:bough_build_id> ${emulation_source}/shared_memory.ld bough_kernels bough_base
    COMMENT "Linking ${variant}/libbough_cuda.so" VERBATIM COMMAND_EXPAND_LISTS)
  set(programs "")
  foreach(program ${ARG_PROGRAMS})
    set(with ${with_all})
    if(program MATCHES "_test$")
      list(APPEND with ${main})
    endif()
    if(program STREQUAL kernels_test)
      bough_emulation_objects(${variant} order_test FLAGS ${ARG_FLAGS} SOURCES ${emulation_source}/host_order_test.cpp)
      list(APPEND with ${order_test})
    endif()
    bough_emulated_program(${variant} "${ARG_FLAGS}" ${program} ${with})
    list(APPEND programs ${folder}/${program})
  endforeach()
  add_custom_target(${variant} ${all} DEPENDS ${folder}/libbough_cuda.so ${programs})
endfunction()

bough_emulation(cuda_emulation ALL FLAGS ${emulation_sanitizers} DEFINITIONS -DBOUGH_EMULATION_ASAN
  PROGRAMS kernels_test train_test rollout_test bough)
# The race detector instead of the sanitizers. The optimiser must not join accesses of different threads' bytes.
bough_emulation(cuda_races PROGRAMS kernels_test FLAGS -O1 DEFINITIONS -DBOUGH_EMULATION_RACES SOURCES ${emulation_source}/races.cpp
  KERNEL_FLAGS -fsanitize=thread -fno-threadsafe-statics -fno-vectorize -fno-slp-vectorize
  LINK_FLAGS -Wl,--wrap=memcpy,--wrap=memset)

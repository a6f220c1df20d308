# A module ("room" in this file's names) is a folder under src/, a static library bough_<module>, and a test
# program <module>_test built from every x_test.cpp beside the code. Sources are found by glob.
include(GoogleTest)

# Adds the program NAME_test of the given files, linked to bough_NAME. `pch`: TORCH or empty (bough_use_pch).
function(bough_add_tests name pch)
  if(ARGN)
    add_executable(${name}_test ${ARGN})
    target_link_libraries(${name}_test PRIVATE bough_${name} GTest::gtest_main)
    bough_use_pch(${name}_test ${pch})
    set_target_properties(${name}_test PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/test)
    add_test(NAME ${name} COMMAND ${name}_test)
  endif()
endfunction()

function(bough_add_room_tests room pch)
  file(GLOB_RECURSE tests CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${room}/*_test.cpp)
  get_property(part_files GLOBAL PROPERTY BOUGH_PART_FILES)
  list(REMOVE_ITEM tests ${part_files})
  bough_add_tests(${room} "${pch}" ${tests})
endfunction()

# A part: torch-free files of modules that need torch. A part is a separate library with tests of its files.
# A part is also built without torch. So the thread sanitizer sees all its code, and including torch in a part
# fails to compile.
function(bough_part name)
  cmake_parse_arguments(ARG "" "" "FILES;ROOMS;LIBS" ${ARGN})
  list(TRANSFORM ARG_FILES PREPEND ${CMAKE_SOURCE_DIR}/src/)
  set(tests)
  foreach(file ${ARG_FILES})
    string(REGEX REPLACE "\\.cpp$" "_test.cpp" test ${file})
    if(EXISTS ${test})
      list(APPEND tests ${test})
    endif()
  endforeach()
  add_library(bough_${name} STATIC ${ARG_FILES})
  target_include_directories(bough_${name} PUBLIC ${CMAKE_SOURCE_DIR}/src)
  list(TRANSFORM ARG_ROOMS PREPEND bough_)
  target_link_libraries(bough_${name} PUBLIC ${ARG_ROOMS} ${ARG_LIBS})
  set_property(GLOBAL APPEND PROPERTY BOUGH_PART_FILES ${ARG_FILES} ${tests})
  bough_use_pch(bough_${name} "")
  bough_add_tests(${name} "" ${tests})
endfunction()

function(bough_room room)
  cmake_parse_arguments(ARG "" "" "ROOMS;PARTS;LIBS" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${room}/*.cpp)
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$|/main\\.cpp$|/mpi_communicator\\.cpp$")  # see cmake/mpi.cmake
  get_property(part_files GLOBAL PROPERTY BOUGH_PART_FILES)
  list(REMOVE_ITEM sources ${part_files})
  list(APPEND ARG_ROOMS ${ARG_PARTS})
  if(NOT sources)  # a new module with headers only
    add_library(bough_${room} INTERFACE)
    target_include_directories(bough_${room} INTERFACE ${CMAKE_SOURCE_DIR}/src)
    return()
  endif()
  add_library(bough_${room} STATIC ${sources})
  target_include_directories(bough_${room} PUBLIC ${CMAKE_SOURCE_DIR}/src)
  list(TRANSFORM ARG_ROOMS PREPEND bough_)
  target_link_libraries(bough_${room} PUBLIC ${ARG_ROOMS} ${ARG_LIBS})
  set(pch "")
  if(bough_torch IN_LIST ARG_LIBS)
    set(pch TORCH)
  endif()
  bough_use_pch(bough_${room} ${pch})
  bough_add_room_tests(${room} "${pch}")
endfunction()

# kernels is one shared library, so that Python can load it with torch.ops.load_library. Files named *_isa.cpp
# hold loops that the compiler vectorises. Each is compiled once per instruction set and chosen at run time.
function(bough_kernels)
  cmake_parse_arguments(ARG "" "" "ROOMS;LIBS" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*.cpp)
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$|_isa\\.cpp$|cuda_ops\\.cpp$")  # see cmake/cuda.cmake
  file(GLOB_RECURSE isa_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*_isa.cpp)
  add_library(bough_kernels SHARED ${sources})
  target_include_directories(bough_kernels PUBLIC ${CMAKE_SOURCE_DIR}/src)
  list(TRANSFORM ARG_ROOMS PREPEND bough_)
  target_link_libraries(bough_kernels PUBLIC ${ARG_ROOMS} ${ARG_LIBS})
  # Options of files with intrinsics of one instruction set, called only if the CPU supports that set. The
  # -Wno options silence false warnings about GCC 12's own intrinsics headers.
  set(intrinsics -O3 -march=x86-64-v4 -Wno-maybe-uninitialized -Wno-uninitialized)
  file(GLOB_RECURSE amx_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*_amx.cpp)
  file(GLOB_RECURSE avx512_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*_avx512.cpp)
  set_source_files_properties(${avx512_sources} PROPERTIES COMPILE_OPTIONS "${intrinsics}")
  file(GLOB_RECURSE bf16_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*_bf16.cpp)
  set_source_files_properties(${bf16_sources}
    PROPERTIES COMPILE_OPTIONS "${intrinsics};-mavx512bf16;-mprfchw")
  set_source_files_properties(${amx_sources}
    PROPERTIES COMPILE_OPTIONS "${intrinsics};-mavx512bf16;-mamx-tile;-mamx-bf16;-mprfchw")
  bough_use_pch(bough_kernels TORCH)
  if(isa_sources)
    foreach(isa baseline avx2 avx512)
      add_library(bough_kernels_${isa} OBJECT ${isa_sources})
      target_include_directories(bough_kernels_${isa} PRIVATE ${CMAKE_SOURCE_DIR}/src)
      target_compile_definitions(bough_kernels_${isa} PRIVATE BOUGH_ISA=${isa})
      # -ffast-math allows vectorised reductions and exp; -fno-finite-math-only keeps infinities and NaN.
      target_compile_options(bough_kernels_${isa} PRIVATE -O3 -ffast-math -fno-finite-math-only)
      if(isa STREQUAL avx2)
        target_compile_options(bough_kernels_${isa} PRIVATE -march=x86-64-v3)
      elseif(isa STREQUAL avx512)
        target_compile_options(bough_kernels_${isa} PRIVATE -march=x86-64-v4 -mprefer-vector-width=512)
      endif()
      target_sources(bough_kernels PRIVATE $<TARGET_OBJECTS:bough_kernels_${isa}>)
    endforeach()
  endif()
  bough_add_room_tests(kernels TORCH)
endfunction()

function(bough_program name source)
  cmake_parse_arguments(ARG "" "" "ROOMS" ${ARGN})
  add_executable(${name} ${source})
  list(TRANSFORM ARG_ROOMS PREPEND bough_)
  target_link_libraries(${name} PRIVATE ${ARG_ROOMS})
  bough_use_pch(${name} TORCH)
endfunction()

# Generates the header `header` for one source file. Its array `name` holds the texts of the other given
# files, which are thereby embedded in the program.
function(bough_embed source header name)
  set(texts "")
  foreach(file IN LISTS ARGN)
    file(READ ${CMAKE_SOURCE_DIR}/${file} text)
    string(APPEND texts "\n// ${file}\nR\"TEXT(${text})TEXT\",\n")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${file})
  endforeach()
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/${header} @ONLY
    CONTENT "// Generated by CMake.\n#pragma once\n\ninline constexpr const char* ${name}[] = {@texts@};\n")
  set_source_files_properties(${source} PROPERTIES INCLUDE_DIRECTORIES ${CMAKE_BINARY_DIR}/generated)
endfunction()

# A module is a folder under src/, a static library bough_<module>, and a test program <module>_test built from
# every x_test.cpp beside the code. Sources are found by glob.
#
# Files are compiled in groups (CMake's UNITY_BUILD), because most of the compile time of a file goes into headers
# that its neighbours include, too. The limit is a compromise: with larger groups a cold build takes less time, and
# a build after one change more (docs/performance.md). Names in unnamed namespaces are therefore unique within a
# module.
include(GoogleTest)

option(BOUGH_GROUP_FILES "Compile files in groups of at most BOUGH_GROUP_BYTES" ON)
set(BOUGH_GROUP_BYTES 40000 CACHE STRING "Bytes of the files of a group; a longer file is compiled alone")

# Files with their own compile options stay alone: CMake leaves them out.
function(bough_group_files target)
  if(NOT BOUGH_GROUP_FILES)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  set(group 0)
  set(filled 0)
  foreach(source ${sources})
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_SOURCE_DIR} OUTPUT_VARIABLE path)
    get_source_file_property(own_options ${source} COMPILE_OPTIONS)
    if(own_options)
      continue()
    endif()
    file(SIZE ${path} bytes)
    math(EXPR filled "${filled} + ${bytes}")
    if(filled GREATER BOUGH_GROUP_BYTES)
      math(EXPR group "${group} + 1")
      set(filled ${bytes})
    endif()
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP
    UNITY_BUILD_RELOCATABLE ON)  # so that ccache serves other checkouts
  # GCC takes the .cpp files of a group for headers, where types from unnamed namespaces would be a fault.
  target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
endfunction()

function(bough_add_module_tests module pch)
  file(GLOB_RECURSE tests CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${module}/*_test.cpp)
  if(tests)
    add_executable(${module}_test ${tests})
    target_link_libraries(${module}_test PRIVATE bough_${module} GTest::gtest_main)
    bough_use_pch(${module}_test ${pch})
    if(NOT module STREQUAL kernels)
      bough_group_files(${module}_test)
    endif()
    set_target_properties(${module}_test PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/test)
    add_test(NAME ${module} COMMAND ${module}_test)
  endif()
endfunction()

# bough_module(name [MODULES the modules that it includes] [LIBS other libraries]). With bough_torch among LIBS,
# the module may include torch.
function(bough_module module)
  cmake_parse_arguments(ARG "" "" "MODULES;LIBS" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${module}/*.cpp)
  # main.cpp is the program; the other two are libraries of their own (cmake/mpi.cmake, cmake/cuda.cmake).
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$|/main\\.cpp$|/(mpi|nccl)_communicator\\.cpp$")
  add_library(bough_${module} STATIC ${sources})
  target_include_directories(bough_${module} PUBLIC ${CMAKE_SOURCE_DIR}/src)
  list(TRANSFORM ARG_MODULES PREPEND bough_)
  target_link_libraries(bough_${module} PUBLIC ${ARG_MODULES} ${ARG_LIBS})
  set(pch "")
  if(bough_torch IN_LIST ARG_LIBS)
    set(pch TORCH)
  endif()
  bough_use_pch(bough_${module} ${pch})
  bough_group_files(bough_${module})
  bough_add_module_tests(${module} "${pch}")
endfunction()

# kernels is one shared library, so that Python can load it with torch.ops.load_library. Files named *_isa.cpp
# hold loops that the compiler vectorises. Each is compiled once per instruction set and chosen at run time.
function(bough_kernels)
  cmake_parse_arguments(ARG "" "" "MODULES;LIBS" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*.cpp)
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$|_isa\\.cpp$|cuda_ops\\.cpp$")  # see cmake/cuda.cmake
  # Files with torch::autograd::Function are first, so that they share groups: its templates take seconds.
  foreach(source ${sources})
    file(STRINGS ${source} uses_autograd REGEX "kernels/common/autograd.h" LIMIT_COUNT 1)
    if(uses_autograd)
      list(REMOVE_ITEM sources ${source})
      list(PREPEND sources ${source})
    endif()
  endforeach()
  file(GLOB_RECURSE isa_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*_isa.cpp)
  add_library(bough_kernels SHARED ${sources})
  target_include_directories(bough_kernels PUBLIC ${CMAKE_SOURCE_DIR}/src)
  list(TRANSFORM ARG_MODULES PREPEND bough_)
  target_link_libraries(bough_kernels PUBLIC ${ARG_MODULES} ${ARG_LIBS})
  # Options of files with intrinsics of one instruction set, called only if the CPU supports that set. The
  # -Wno options silence false warnings about GCC 12's own intrinsics headers.
  set(intrinsics -O3 -march=x86-64-v4 -Wno-maybe-uninitialized -Wno-uninitialized)
  file(GLOB_RECURSE amx_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*_amx.cpp)
  file(GLOB_RECURSE avx512_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*_avx512.cpp)
  set_source_files_properties(${avx512_sources} PROPERTIES COMPILE_OPTIONS "${intrinsics}")
  file(GLOB_RECURSE avx2_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*_avx2.cpp)
  set_source_files_properties(${avx2_sources} PROPERTIES COMPILE_OPTIONS "-O3;-march=x86-64-v3")
  file(GLOB_RECURSE bf16_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*_bf16.cpp)
  set_source_files_properties(${bf16_sources}
    PROPERTIES COMPILE_OPTIONS "${intrinsics};-mavx512bf16;-mprfchw")
  set_source_files_properties(${amx_sources}
    PROPERTIES COMPILE_OPTIONS "${intrinsics};-mavx512bf16;-mamx-tile;-mamx-bf16;-mprfchw")
  bough_use_pch(bough_kernels TORCH)
  bough_group_files(bough_kernels)
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
  bough_add_module_tests(kernels TORCH)
endfunction()

function(bough_program name source)
  cmake_parse_arguments(ARG "" "" "MODULES" ${ARGN})
  add_executable(${name} ${source})
  list(TRANSFORM ARG_MODULES PREPEND bough_)
  target_link_libraries(${name} PRIVATE ${ARG_MODULES})
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

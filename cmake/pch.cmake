# Precompiled headers, only for build speed: every file includes what it uses and compiles without them.
#
# There are two. bough_pch_torch halves the compile time of a file that uses ATen's operators (6 of 9 s are
# parsing). It also instantiates 1.3 s of templates in every file that uses it, so files without torch skip
# it. bough_pch_std has the standard library, for modules without torch. JSON is in neither: GCC keeps pending
# template instantiations in the header, so nlohmann's parser would cost each file as much as parsing the
# header does.
option(BOUGH_PCH "Compile with precompiled headers" ON)

set(pch_std_headers
  <algorithm> <array> <atomic> <bit> <charconv> <chrono> <cmath> <condition_variable> <cstdint> <cstdio> <cstdlib>
  <cstring> <deque> <filesystem> <fstream> <functional> <iostream> <limits> <map> <memory> <mutex> <numeric> <optional>
  <random> <set> <span> <sstream> <string> <string_view> <thread> <tuple> <unordered_map> <unordered_set> <utility>
  <variant> <vector>)
set(pch_torch_headers <ATen/ATen.h> <ATen/Parallel.h>)

# GCC rejects a -fPIC precompiled header for -fPIE files, so programs are compiled with -fPIC like libraries.
set(CMAKE_CXX_COMPILE_OPTIONS_PIE ${CMAKE_CXX_COMPILE_OPTIONS_PIC})

# Without -fpch-preprocess, ccache would expand all headers of every file that it looks up.
set(pch_options)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  set(pch_options -fpch-preprocess)
endif()

# GCC writes the checkout's path into a precompiled header, so ccache would miss results of other checkouts.
# ccache instead uses the checksum in NAME.gch.sum (CCACHE_PCH_EXTSUM, set in CMakeLists.txt). The checksum
# covers the preprocessed headers and the flags.
function(bough_sum_pch name)
  cmake_parse_arguments(ARG "" "" "HEADERS;LIBS" ${ARGN})
  if(NOT CCACHE OR NOT CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    return()
  endif()
  set(flags -std=c++20)
  foreach(lib ${ARG_LIBS})
    foreach(property INTERFACE_COMPILE_OPTIONS INTERFACE_INCLUDE_DIRECTORIES)
      get_target_property(values ${lib} ${property})
      if(values AND property MATCHES INCLUDE)
        list(TRANSFORM values PREPEND -isystem)
      endif()
      if(values)
        list(APPEND flags ${values})
      endif()
    endforeach()
  endforeach()
  list(TRANSFORM ARG_HEADERS PREPEND "#include ")
  list(JOIN ARG_HEADERS "\n" text)
  set(input ${CMAKE_BINARY_DIR}/${name}_sum.cpp)
  file(WRITE ${input} "${text}\n")
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} ${flags} -E -P -dD ${input} OUTPUT_FILE ${input}.i COMMAND_ERROR_IS_FATAL ANY)
  file(SHA256 ${input}.i sum)
  file(REMOVE ${input} ${input}.i)
  string(TOUPPER "${CMAKE_BUILD_TYPE}" type)
  string(REPLACE ${CMAKE_SOURCE_DIR} "" options "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${type}} ${BOUGH_SANITIZE}")
  file(WRITE ${CMAKE_BINARY_DIR}/CMakeFiles/${name}.dir/cmake_pch.hxx.gch.sum
    "${sum} ${options} ${CMAKE_CXX_COMPILER_VERSION}\n")
endfunction()

function(bough_add_pch name)
  cmake_parse_arguments(ARG "" "" "HEADERS;LIBS" ${ARGN})
  if(BOUGH_PCH)
    bough_sum_pch(${name} HEADERS ${ARG_HEADERS} LIBS ${ARG_LIBS})
    file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/${name}.cpp CONTENT "")
    add_library(${name} OBJECT ${CMAKE_BINARY_DIR}/${name}.cpp)
    target_link_libraries(${name} PRIVATE ${ARG_LIBS})
    target_compile_options(${name} PRIVATE ${pch_options})
    target_precompile_headers(${name} PRIVATE ${ARG_HEADERS})
  endif()
endfunction()

# Sets `out` to ON if a file includes a torch header, directly or through headers of the project.
function(bough_uses_torch file out)
  string(MAKE_C_IDENTIFIER uses_torch_${file} key)
  get_property(known GLOBAL PROPERTY ${key})
  if("${known}" STREQUAL "")
    set_property(GLOBAL PROPERTY ${key} OFF)  # ends cycles
    set(known OFF)
    cmake_path(GET file PARENT_PATH folder)
    file(STRINGS ${file} lines REGEX "^#include [<\"]")
    foreach(line ${lines})
      if(line MATCHES "<(ATen|torch|c10)/")
        set(known ON)
      elseif(line MATCHES "\"(.+)\"")
        foreach(header ${CMAKE_SOURCE_DIR}/src/${CMAKE_MATCH_1} ${folder}/${CMAKE_MATCH_1})
          if(NOT known AND EXISTS ${header})
            bough_uses_torch(${header} known)
          endif()
        endforeach()
      endif()
      if(known)
        break()
      endif()
    endforeach()
    set_property(GLOBAL PROPERTY ${key} ${known})
  endif()
  set(${out} ${known} PARENT_SCOPE)
endfunction()

# Gives a target its precompiled header: bough_pch_torch with TORCH (the target links torch), else
# bough_pch_std. Files with their own compile options get none, because GCC would reject the header.
function(bough_use_pch target)
  cmake_parse_arguments(ARG "TORCH" "" "" ${ARGN})
  if(NOT BOUGH_PCH)
    return()
  endif()
  set(pch bough_pch_std)
  if(ARG_TORCH)
    set(pch bough_pch_torch)
  endif()
  get_target_property(sources ${target} SOURCES)
  foreach(source ${sources})
    if(NOT source MATCHES "\\.cpp$")
      continue()
    endif()
    get_source_file_property(own_options ${source} COMPILE_OPTIONS)
    set(uses_torch ON)
    if(ARG_TORCH)
      cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_SOURCE_DIR} OUTPUT_VARIABLE path)
      bough_uses_torch(${path} uses_torch)
    endif()
    if(own_options OR NOT uses_torch)
      set_source_files_properties(${source} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
    endif()
  endforeach()
  target_compile_options(${target} PRIVATE ${pch_options})
  target_precompile_headers(${target} REUSE_FROM ${pch})
endfunction()

# A room is a folder under src/, a static library bough_<room>, and a test program <room>_test made of
# every x_test.cpp that stands beside the code. Sources are found by glob.
include(GoogleTest)

function(bough_add_room_tests room)
  file(GLOB_RECURSE tests CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${room}/*_test.cpp)
  if(tests)
    add_executable(${room}_test ${tests})
    target_link_libraries(${room}_test PRIVATE bough_${room} GTest::gtest_main ${ARGN})
    set_target_properties(${room}_test PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/test)
    add_test(NAME ${room} COMMAND ${room}_test)
  endif()
endfunction()

function(bough_room room)
  cmake_parse_arguments(ARG "" "" "ROOMS;LIBS" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${room}/*.cpp)
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$|/main\\.cpp$")
  if(NOT sources)  # a room being started: headers only
    add_library(bough_${room} INTERFACE)
    target_include_directories(bough_${room} INTERFACE ${CMAKE_SOURCE_DIR}/src)
    return()
  endif()
  add_library(bough_${room} STATIC ${sources})
  target_include_directories(bough_${room} PUBLIC ${CMAKE_SOURCE_DIR}/src)
  list(TRANSFORM ARG_ROOMS PREPEND bough_)
  target_link_libraries(bough_${room} PUBLIC ${ARG_ROOMS} ${ARG_LIBS})
  bough_add_room_tests(${room})
endfunction()

# kernels is one shared library, so that Python loads it by torch.ops.load_library. Files named *_isa.cpp
# hold loops that the compiler vectorises; each is compiled once per instruction set and chosen at run time.
function(bough_kernels)
  cmake_parse_arguments(ARG "" "" "ROOMS;LIBS" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*.cpp)
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$|_isa\\.cpp$|cuda_ops\\.cpp$")  # the last: cmake/cuda.cmake
  file(GLOB_RECURSE isa_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*_isa.cpp)
  add_library(bough_kernels SHARED ${sources})
  target_include_directories(bough_kernels PUBLIC ${CMAKE_SOURCE_DIR}/src)
  list(TRANSFORM ARG_ROOMS PREPEND bough_)
  target_link_libraries(bough_kernels PUBLIC ${ARG_ROOMS} ${ARG_LIBS})
  # Written with one instruction set's intrinsics, called only where the CPU has it. GCC 12's header takes values of its
  # own for uninitialized.
  set(intrinsics -O3 -march=x86-64-v4 -Wno-maybe-uninitialized -Wno-uninitialized)
  file(GLOB_RECURSE amx_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*_amx.cpp)
  file(GLOB_RECURSE avx512_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*_avx512.cpp)
  set_source_files_properties(${avx512_sources} PROPERTIES COMPILE_OPTIONS "${intrinsics}")
  file(GLOB_RECURSE bf16_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/*_bf16.cpp)
  set_source_files_properties(${bf16_sources}
    PROPERTIES COMPILE_OPTIONS "${intrinsics};-mavx512bf16;-mprfchw")
  set_source_files_properties(${amx_sources}
    PROPERTIES COMPILE_OPTIONS "${intrinsics};-mavx512bf16;-mamx-tile;-mamx-bf16;-mprfchw")
  if(isa_sources)
    foreach(isa baseline avx2 avx512)
      add_library(bough_kernels_${isa} OBJECT ${isa_sources})
      target_include_directories(bough_kernels_${isa} PRIVATE ${CMAKE_SOURCE_DIR}/src)
      target_compile_definitions(bough_kernels_${isa} PRIVATE BOUGH_ISA=${isa})
      # -ffast-math lets reductions and exp vectorise; infinities and NaN keep their meaning.
      target_compile_options(bough_kernels_${isa} PRIVATE -O3 -ffast-math -fno-finite-math-only)
      if(isa STREQUAL avx2)
        target_compile_options(bough_kernels_${isa} PRIVATE -march=x86-64-v3)
      elseif(isa STREQUAL avx512)
        target_compile_options(bough_kernels_${isa} PRIVATE -march=x86-64-v4 -mprefer-vector-width=512)
      endif()
      target_sources(bough_kernels PRIVATE $<TARGET_OBJECTS:bough_kernels_${isa}>)
    endforeach()
  endif()
  bough_add_room_tests(kernels)
endfunction()

function(bough_program name source)
  cmake_parse_arguments(ARG "" "" "ROOMS" ${ARGN})
  add_executable(${name} ${source})
  list(TRANSFORM ARG_ROOMS PREPEND bough_)
  target_link_libraries(${name} PRIVATE ${ARG_ROOMS})
endfunction()

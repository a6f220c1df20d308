# libbough_mpi.so: ranks started by mpirun or srun (src/comm/communicator.h). The program opens this library
# at run time. A build and a run with one rank need no MPI.
pkg_check_modules(mpi QUIET IMPORTED_TARGET ompi-c)
if(NOT mpi_FOUND)
  message(STATUS "No MPI library: Open MPI's ompi-c.pc is not found; ranks are started as plain processes")
  return()
endif()
add_library(bough_mpi SHARED ${CMAKE_SOURCE_DIR}/src/comm/mpi_communicator.cpp)
target_link_libraries(bough_mpi PRIVATE bough_build_id bough_comm PkgConfig::mpi)

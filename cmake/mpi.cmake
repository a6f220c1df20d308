# libbough_mpi.so: ranks that mpirun or srun start (src/dist/communicator.h). The program opens it at run time, so that
# MPI is needed neither to build nor to run one rank.
pkg_check_modules(mpi QUIET IMPORTED_TARGET ompi-c)
if(NOT mpi_FOUND)
  message(STATUS "No MPI library: Open MPI's ompi-c.pc is not found; ranks are started as plain processes")
  return()
endif()
add_library(bough_mpi SHARED ${CMAKE_SOURCE_DIR}/src/dist/mpi_communicator.cpp)
target_link_libraries(bough_mpi PRIVATE bough_dist PkgConfig::mpi)

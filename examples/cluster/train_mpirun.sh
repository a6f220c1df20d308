#!/bin/sh
# Runs `bough train` on the hosts of a file, with Open MPI only:
#
#   examples/cluster/train_mpirun.sh hosts 8 config.yaml [key=value ...]
#
# hosts: lines like `node1 slots=4`. Each rank has OMP_NUM_THREADS threads (default 1). kill -USR1 on mpirun
# writes a checkpoint and ends the run; the same command resumes it. A dead rank ends all ranks.
set -eu
hosts=$1 ranks=$2
shift 2
exec mpirun -n "$ranks" --hostfile "$hosts" --bind-to none --mca mpi_yield_when_idle 1 \
  -x OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "${BOUGH:-bough}" train "$@"

#!/bin/bash
# Starts a single-machine Slurm, for trying job scripts. Run it as root. It needs Debian's slurmctld, slurmd,
# slurm-client and munge.
#
#   examples/cluster/slurm_on_one_machine.sh start FOLDER   then: export SLURM_CONF=FOLDER/slurm.conf
#   examples/cluster/slurm_on_one_machine.sh stop FOLDER
set -eu
command=$1 folder=$(mkdir -p "$2" && cd "$2" && pwd)

case "$command" in
  start)
    mkdir -p "$folder/state" "$folder/spool" /run/munge
    cat > "$folder/slurm.conf" << CONF
ClusterName=one
SlurmctldHost=$(hostname)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=20
SlurmctldPort=26817
SlurmdPort=26818
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
NodeName=$(hostname) CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
CONF
    [ -f /etc/munge/munge.key ] || mungekey --create
    chown munge: /run/munge
    pgrep -x munged > /dev/null || su -s /bin/sh munge -c 'munged'
    export SLURM_CONF=$folder/slurm.conf
    slurmctld
    slurmd
    for _ in $(seq 100); do
      [ "$(sinfo --noheader --format %T 2> /dev/null)" = idle ] && exit 0
      sleep 0.1
    done
    echo "the node is not up: see $folder/slurmctld.log and slurmd.log" >&2
    exit 1
    ;;
  stop)
    for name in slurmd slurmctld; do
      [ ! -f "$folder/$name.pid" ] || kill "$(cat "$folder/$name.pid")"
    done
    ;;
  *)
    echo "usage: $0 start|stop FOLDER" >&2
    exit 2
    ;;
esac

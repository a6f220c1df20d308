"""Helpers of the tests of runs with several processes, `--ranks N`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from run_util import ENVIRONMENT as OF_RUNS
from run_util import last_checkpoint, read_rollouts
from safetensors.numpy import load_file

LAUNCHERS = ["mpirun", "processes"]
# torch's store looks up the name of each address. If no name server answers, the lookup takes as long as
# these options say.
ENVIRONMENT = {**OF_RUNS, "RES_OPTIONS": "timeout:1 attempts:1"}


REWARD = """
def reward(prompt, completion, **rest):
    return sum(map(ord, completion)) % 7 / 7
"""

# The variables that srun sets for torchrun, and that torchrun's workers find.
UNDER_SRUN = {"PMIX_RANK": "0", "SLURM_LOCALID": "0"}


def torchrun_command(bough, *words, ranks):
    program = Path(sys.executable).parent / "torchrun"
    command = [program, "--nproc-per-node", ranks, "--standalone", "--no-python", bough.program, *words]
    return list(map(str, command))


def torchrun(bough, *words, ranks, **more):
    return subprocess.run(
        torchrun_command(bough, *words, ranks=ranks),
        cwd=bough.cwd,
        env={**os.environ, **ENVIRONMENT, **UNDER_SRUN},
        capture_output=True,
        text=True,
        check=False,
        **more,
    )


def start(bough, *words):
    return subprocess.Popen(
        [str(bough.program), *map(str, words)],
        cwd=bough.cwd,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def ranks_of(process, count, launcher="mpirun"):
    """Returns the processes that mpirun, or the command itself, has started."""
    deadline = time.monotonic() + 60
    ranks = []
    while len(ranks) < count and time.monotonic() < deadline:
        time.sleep(0.05)
        ranks = children(process.pid)
        if launcher == "mpirun":
            ranks = [rank for started in ranks for rank in children(started)]
    assert len(ranks) == count, "the ranks have not been started"
    return sorted(ranks)


def kill_and_see_all_end(process, ranks, killed):
    os.kill(ranks[killed], signal.SIGKILL)
    begin = time.monotonic()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "a rank was ended by signal 9" in said
    see_all_end(ranks, begin)


def see_all_end(ranks, begin):
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.monotonic() - begin < 10:
        time.sleep(0.1)
    assert time.monotonic() - begin < 10, "another rank goes on"


def weights_of(run):
    return load_file(last_checkpoint(run) / "model" / "model.safetensors")


def largest_difference(run, other):
    a, b = weights_of(run), weights_of(other)
    return max(float(abs(a[name] - b[name]).max()) for name in a)


def wait_for_checkpoint(run):
    deadline = time.monotonic() + 300  # ranks that share busy cores wait for each other
    while not (run / "latest").exists():
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)


def samples_of(folder, step):
    return read_rollouts(folder / f"rollouts/step_{step}.jsonl.zst")

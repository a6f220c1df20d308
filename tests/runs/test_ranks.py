"""`--ranks N`: several processes compute the gradient of a step, or of a whole run, together. Open MPI starts
the processes, or the command itself does."""

import json
import math
import socket
import subprocess
import time

import pytest
from ranks_util import ENVIRONMENT, LAUNCHERS, kill_and_see_all_end, ranks_of, start, torchrun


def result_of(bough, *words):
    return json.loads(bough(*words, "--json", ok=True, env=ENVIRONMENT).stdout.splitlines()[-1])


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("loss", ["ppo", "gspo"])  # the ratio of gspo is computed for a sequence
def test_ranks_have_the_gradient_of_one(bough, step, loss, launcher):
    alone = result_of(bough, *step, f"actor.loss={loss}")
    for ranks in (2, 3):
        together = result_of(bough, *step, f"actor.loss={loss}", "--ranks", ranks, "--launcher", launcher)
        assert together["ranks"] == ranks
        assert together["trained_tokens"] == alone["trained_tokens"]
        for name in ("loss", "grad_norm"):
            assert math.isclose(together[name], alone[name], rel_tol=1e-10), name


def num_gpus():
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("backend", ["fsdp:p2", "fsdp:d2p2"])
def test_stages_have_the_gradient_of_one(bough, step, backend, launcher):
    alone = result_of(bough, *step)
    together = result_of(bough, *step, f"actor.backend={backend}", "--launcher", launcher)
    assert together["ranks"] == (4 if "d2" in backend else 2)
    for name in ("loss", "grad_norm"):
        assert math.isclose(together[name], alone[name], rel_tol=1e-10), name


@pytest.mark.parametrize("backend", ["fsdp:d2", "fsdp:t2", "fsdp:c2", "fsdp:p2"])
def test_gpus_have_the_gradient_of_one(bough, step, backend):
    try:
        count = num_gpus()
    except FileNotFoundError:
        count = 0
    if count < 2:
        pytest.skip("needs two GPUs")
    words = [word if word != "fp64" else "fp32" for word in step]
    alone = result_of(bough, *words, "--device", "cuda")
    together = result_of(bough, *words, "--device", "cuda", f"actor.backend={backend}")
    for name in ("loss", "grad_norm"):
        assert math.isclose(together[name], alone[name], rel_tol=1e-4), name


def test_torchrun_starts_ranks(bough, step):
    alone = result_of(bough, *step)
    said = torchrun(bough, *step, "--json", ranks=2, timeout=120)
    assert said.returncode == 0, said.stderr
    together = json.loads(said.stdout.splitlines()[-1])
    assert together["ranks"] == 2
    assert math.isclose(together["grad_norm"], alone["grad_norm"], rel_tol=1e-10)


def test_failed_connections_of_ranks_name_the_cause(bough, step):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        variables = {**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        said = bough(*step, env={**variables, "MASTER_PORT": port})
        assert said.returncode == 2 and "a port that is free there" in said.stderr, said.stderr
        said = bough(*step, env=variables)
        assert said.returncode == 2 and "MASTER_PORT: not set" in said.stderr, said.stderr


def test_ranks_start_where_there_is_no_mpirun(bough, step):
    said = bough(*step, "--ranks", 2, ok=True, env={**ENVIRONMENT, "PATH": "/nowhere"})
    assert said.stdout.count("gradient norm") == 1
    asked = bough(*step, "--ranks", 2, "--launcher", "mpirun", env={**ENVIRONMENT, "PATH": "/nowhere"})
    assert asked.returncode == 2 and "use --launcher processes" in asked.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_only_one_rank_prints_and_every_rank_says_what_is_wrong(bough, step, launcher):
    words = ("--ranks", 2, "--launcher", launcher)
    said = bough(*step, *words, ok=True, env=ENVIRONMENT)
    assert said.stdout.count("gradient norm") == 1
    missing = bough("step", "--model", "nowhere", "--rollouts", "rollouts.jsonl", *words, env=ENVIRONMENT)
    assert missing.returncode == 2
    assert "rank 0: bough step: nowhere" in missing.stderr
    wrong = bough(*step, "--ranks", 0)
    assert wrong.returncode == 2
    assert "expected 1 to" in wrong.stderr
    other = bough(*step, "--ranks", 2, "--launcher", "slurm")
    assert other.returncode == 2
    assert "expected auto, mpirun or processes" in other.stderr
    alone = bough(*step, "--launcher", "processes")
    assert alone.returncode == 2
    assert "without --ranks" in alone.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_dies_ends_all(bough, step, launcher):
    process = start(bough, *step, "--ranks", 2, "--repeat", 1000000, "--launcher", launcher)
    ranks = ranks_of(process, 2, launcher)
    time.sleep(2)
    kill_and_see_all_end(process, ranks, killed=1)

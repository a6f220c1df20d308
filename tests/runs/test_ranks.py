"""`bough step --ranks N`: processes that Open MPI starts take one gradient together."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_util import ENVIRONMENT

WORKLOAD = Path(__file__).resolve().parents[2] / "bench/workload.py"


@pytest.fixture
def step(bough):
    """A model, an agentic rollout set, and the words of a step of it."""
    bough("init", "model", "--hidden-size", 32, "--layers", 2, "--vocab-size", 300, ok=True)
    shape = [
        "--shape",
        "agentic",
        "--n",
        "4",
        "--plen",
        "30",
        "--turns",
        "3",
        "--rlen",
        "12",
        "--prompts",
        "2",
    ]
    command = [sys.executable, WORKLOAD, *shape, "--vocab", "300", "--out", bough.cwd / "rollouts.jsonl"]
    subprocess.run(command, check=True, capture_output=True)
    return ["step", "--model", "model", "--rollouts", "rollouts.jsonl", "--dtype", "fp64"]


def result_of(bough, *words):
    return json.loads(bough(*words, "--json", ok=True, env=ENVIRONMENT).stdout.splitlines()[-1])


@pytest.mark.parametrize("loss", ["ppo", "gspo"])  # gspo's ratio is a sequence's
def test_ranks_have_the_gradient_of_one(bough, step, loss):
    alone = result_of(bough, *step, f"actor.loss={loss}")
    for ranks in (2, 3):
        together = result_of(bough, *step, f"actor.loss={loss}", "--ranks", ranks)
        assert together["ranks"] == ranks
        assert together["trained_tokens"] == alone["trained_tokens"]
        for name in ("loss", "grad_norm"):
            assert math.isclose(together[name], alone[name], rel_tol=1e-10), name


def test_only_one_rank_prints_and_every_rank_says_what_is_wrong(bough, step):
    said = bough(*step, "--ranks", 2, ok=True, env=ENVIRONMENT)
    assert said.stdout.count("gradient norm") == 1
    missing = bough(
        "step", "--model", "nowhere", "--rollouts", "rollouts.jsonl", "--ranks", 2, env=ENVIRONMENT
    )
    assert missing.returncode == 2
    assert "rank 0: bough step: nowhere" in missing.stderr
    wrong = bough(*step, "--ranks", 0)
    assert wrong.returncode == 2
    assert "expected 1 to" in wrong.stderr


def test_a_rank_that_dies_ends_all(bough, step):
    process = subprocess.Popen(
        [str(bough.program), *step, "--ranks", "2", "--repeat", "1000000"],
        cwd=bough.cwd,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    ranks = []
    while len(ranks) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        found = subprocess.run(
            ["pgrep", "-P", str(process.pid), "-f", "bough step"], capture_output=True, text=True, check=False
        )
        ranks = [int(word) for word in found.stdout.split()]
    assert len(ranks) == 2, "mpirun has not started its ranks"
    time.sleep(2)
    os.kill(ranks[1], signal.SIGKILL)
    begin = time.monotonic()
    assert process.wait(timeout=30) != 0
    while Path(f"/proc/{ranks[0]}").exists() and time.monotonic() - begin < 10:
        time.sleep(0.1)
    assert time.monotonic() - begin < 10, "the other rank goes on"

"""Fixtures of several files of tests."""

import subprocess
import sys
from pathlib import Path

import pytest
from ranks_util import ENVIRONMENT, REWARD
from run_util import write_experiment

WORKLOAD = Path(__file__).resolve().parents[2] / "bench/workload.py"


@pytest.fixture
def step(bough):
    """A model, an agentic rollout set, and the arguments of `bough step` for them."""
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


@pytest.fixture
def experiment(bough):
    """A run in which samples of a prompt differ in their rewards from the first step on."""
    (bough.cwd / "letters.py").write_text(REWARD)
    settings = {"reward": "letters.py:reward", "valid_dataset.path": "", "total_train_steps": 6}

    def run(trial, *words, **more):
        return bough("train", "config.yaml", f"trial_name={trial}", *words, ok=True, env=ENVIRONMENT, **more)

    write_experiment(bough, **settings)
    run.folder = lambda trial: bough.cwd / "runs" / "tiny" / trial
    return run

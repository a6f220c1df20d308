"""`bough train` on the emulated device (docs/cuda_emulation.md). Work of two threads on two streams, copies
through pinned memory and recorded graphs must be ordered, or the run ends."""

import os
import subprocess

import pytest
from run_util import read_metrics, write_experiment


@pytest.fixture
def train(bough, build_dir):
    if "BOUGH_CUDA_EMULATION:BOOL=ON" not in (build_dir / "CMakeCache.txt").read_text():
        pytest.skip("the preset has no emulated device")

    def run(emulated=True, **settings):
        write_experiment(bough, device="cuda", **settings)
        environment = {"OMP_NUM_THREADS": "1", "BOUGH_EMULATED_MEMORY": "2000000000"}
        if emulated:
            environment["BOUGH_EMULATED_CUDA"] = "1"
        return subprocess.run(
            [build_dir / "cuda_emulation" / "bough", "train", "config.yaml"],
            cwd=bough.cwd,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=600,
            check=False,
            env={**os.environ, **environment},
        )

    return run


def test_an_asynchronous_run_with_checkpoints_orders_its_work(bough, train):
    settings = {
        "rollout.max_head_offpolicyness": 2,
        "actor.optimizer.offload": True,
        "total_train_steps": 3,
        "saver.freq_steps": 1,
        "evaluator.at_start": False,
        "evaluator.at_end": False,
    }
    done = train(**settings)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert read_metrics(bough.cwd / "runs" / "tiny" / "trial0")[-1]["step"] == 3


def test_nobody_gets_the_emulated_device_without_asking_for_it(train):
    done = train(emulated=False)
    assert done.returncode == 2
    assert "found no GPU" in done.stderr

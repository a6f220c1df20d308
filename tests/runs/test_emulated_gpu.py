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

    def run(*arguments, emulated=True, **settings):
        if not (bough.cwd / "config.yaml").exists():
            short = {"evaluator.at_start": False, "evaluator.at_end": False}
            write_experiment(bough, device="cuda", **short, **settings)
        environment = {"OMP_NUM_THREADS": "1", "BOUGH_EMULATED_MEMORY": "2000000000"}
        if emulated:
            environment["BOUGH_EMULATED_CUDA"] = "1"
        return subprocess.run(
            [build_dir / "cuda_emulation" / "bough", "train", "config.yaml", *arguments],
            cwd=bough.cwd,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=600,
            check=False,
            env={**os.environ, **environment},
        )

    return run


BESIDE = {"rollout.max_head_offpolicyness": 2, "saver.freq_steps": 1}


def expect_steps(bough, done, steps):
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert read_metrics(bough.cwd / "runs" / "tiny" / "trial0")[-1]["step"] == steps


def test_an_asynchronous_run_with_checkpoints_orders_its_work(bough, train):
    done = train(**BESIDE, **{"actor.optimizer.offload": True, "total_train_steps": 3})
    expect_steps(bough, done, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rollout.quantization": "int8"},
        {"rollout.sparse.budget": 64, "gconfig.max_new_tokens": 24},
        {"lora.rank": 4, "lora.targets": ["all-linear", "lm_head"], "actor.optimizer.offload": True},
        {"actor.adv_estimator": "gae"},
        {"actor.kl_ctl": 0.01, "teacher.path": "base"},
        {"rollout.interruptible": True, "actor.ppo_n_minibatches": 2},
        {"actor.gradient_checkpointing": True, "actor.activation_offload": True},
        {"actor.deterministic": True, "dtype": "fp32"},
    ],
    ids=lambda settings: " ".join(settings) or "defaults",
)
@pytest.mark.parametrize("beside", [{}, BESIDE], ids=["in turns", "beside"])
def test_runs_of_all_kinds_order_their_work_and_resume(settings, beside, bough, train):
    expect_steps(bough, train(**beside, **settings, total_train_steps=2), 2)
    expect_steps(bough, train("total_train_steps=4"), 4)


def test_nobody_gets_the_emulated_device_without_asking_for_it(train):
    done = train(emulated=False)
    assert done.returncode == 2
    assert "found no GPU" in done.stderr

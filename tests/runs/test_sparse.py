"""Whole runs that generate by sparse attention: the arms of sparse_training, a killed run that goes on."""

import os
import signal
import subprocess

import pytest
from run_util import ENVIRONMENT, comparable_metrics, final_state, read_metrics, write_experiment
from test_train import wait_for_steps

SPARSE = {
    "rollout.sparse.budget": "16x4",
    "rollout.sparse.dense_layers": 1,
    "gconfig.max_new_tokens": 120,
    "gconfig.ignore_eos": True,
    "evaluator.freq_steps": 0,
    "evaluator.at_start": False,
    "evaluator.at_end": False,
}
DISTILL = {
    **SPARSE,
    "sparse_training.arm": "distill",
    "sparse_training.kl_loss_coef": 0.1,
    "sparse_training.lora.rank": 4,
}


def test_arms_train_what_they_say(bough):
    config = write_experiment(bough, **SPARSE, total_train_steps=3)
    runs = bough.cwd / "runs/tiny"
    more = {
        "exact_top_k": ["rollout.sparse.summary=exact"],
        "sparse_to_sparse": ["rollout.sparse.replay=true", "rollout.sparse.budget=[16x4, 100:16x5]"],
    }
    for arm in ("sparse", "exact_top_k", "distill", "sparse_to_sparse"):
        arguments = [f"sparse_training.arm={arm}", f"trial_name={arm}", *more.get(arm, [])]
        bough("train", config, *arguments, ok=True, env=ENVIRONMENT)
        records = read_metrics(runs / arm)
        assert len(records) == 3
        assert all(record["rollout/active_pages"] < 1 for record in records)
        mismatch = [record["mismatch/logprob_abs_diff"] for record in records]
        if arm == "sparse_to_sparse":  # what is trained is what generates
            assert max(mismatch) < 1e-4
        else:
            assert min(mismatch) > (1e-6 if arm == "exact_top_k" else 1e-4)
        assert all(("sparse/acceptance" in record) == (arm != "sparse_to_sparse") for record in records)
        assert all(("sparse/kl" in record) == (arm == "distill") for record in records)
        if "rollout.sparse.replay=true" in arguments:
            assert all(record["sparse/replayed"] > 0.9 for record in records)
    assert (runs / "distill/checkpoints/step_3/sparse_adapter/adapter_model.safetensors").exists()
    # What generated is exported as any adapter is.
    step = runs / "distill/checkpoints/step_3"
    bough("merge", step / "model", step / "sparse_adapter", "both", ok=True)


def test_a_killed_distilling_run_ends_as_one_that_was_not(bough):
    config = write_experiment(bough, **DISTILL, **{"saver.freq_steps": 2}, total_train_steps=7)
    bough("train", config, "trial_name=whole", ok=True, env=ENVIRONMENT)
    whole, killed = bough.cwd / "runs/tiny/whole", bough.cwd / "runs/tiny/killed"
    process = subprocess.Popen(
        [str(bough.program), "train", str(config), "trial_name=killed"],
        cwd=bough.cwd,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_steps(killed, 3, process, seconds=120)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    bough("train", config, "trial_name=killed", ok=True, env=ENVIRONMENT)
    assert final_state(killed).keys() == final_state(whole).keys()
    for name, content in final_state(whole).items():
        if name != "state.json":
            assert final_state(killed)[name] == content, name
    assert comparable_metrics(killed) == comparable_metrics(whole)


def test_an_asynchronous_run_publishes_both_policies(bough):
    config = write_experiment(
        bough, **DISTILL, **{"rollout.max_head_offpolicyness": 2, "saver.freq_steps": 2}, total_train_steps=6
    )
    bough("train", config, ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/trial0"
    records = read_metrics(run)
    assert len(records) == 6
    assert all(0 < record["sparse/acceptance"] <= 1 for record in records)
    # A publication's checksum is over weights and adapters, and the engine takes it every step.
    assert max(record["staleness/max"] for record in records) <= 2
    assert "sparse_adapter/optimizer.safetensors" in final_state(run)


@pytest.mark.parametrize(
    "setting, words",
    [
        ("rollout.sparse.budget=none", "expected a budget"),
        ("lora.rank=4", "adapters of its own"),
        ("rollout.quantization=int8", "below its adapters"),
        ("sparse_training.arm=exact_top_k", "expected exact"),
        ("rollout.sparse.budget=[16x4, 100:16x4]", "larger budgets of longer contexts"),
    ],
)
def test_what_does_not_go_together_is_refused(bough, setting, words):
    config = write_experiment(bough, **DISTILL)
    result = bough("train", config, setting)
    assert result.returncode == 2
    assert words in result.stderr

"""Whole runs on the emulated device (docs/cuda_emulation.md): their peak of device memory against the memory
plan (docs/gpu_memory.md), and runs on devices that are 1% smaller and larger than the least that the plan
names."""

import functools
import json
import math
import os
import subprocess

import pytest
from run_util import ENVIRONMENT, to_yaml

ENOUGH = 4_000_000_000

# The emulated device has no context, libraries and gaps. Other rows with the note `assumed` are not measured.
NOT_EMULATED = ("CUDA context and other programs", "reserve")
RESERVE = 0.03  # of the device's memory

SETTINGS = {
    "experiment_name": "tiny",
    "device": "cuda",
    "model.path": "base",
    "train_dataset.path": "train.jsonl",
    "train_dataset.batch_size": 2,
    # All samples are as long as the plan assumes.
    "train_dataset.max_length": 48,
    "train_dataset.overlong_prompts": "truncate_left",
    "gconfig.n_samples": 4,
    "gconfig.max_new_tokens": 16,
    "gconfig.ignore_eos": True,
    "rollout.max_concurrent_rollouts": 8,
    "rollout.prefill_chunk_tokens": 16,
    "actor.optimizer.lr": 1e-3,
    "actor.optimizer.offload": False,
    "saver.freq_steps": 0,
    "total_train_steps": 2,
}
ASYNCHRONOUS = {"rollout.max_head_offpolicyness": 2}
CRITIC = {"actor.adv_estimator": "gae", "critic.optimizer.offload": False}
OFFLOAD = {"actor.optimizer.offload": True}
CHECKPOINTS = {"saver.freq_steps": 1}
LORA = {"lora.rank": 8}
CONFIGURATIONS = {
    "synchronous": {},
    "fp32": {"dtype": "fp32"},
    "checkpoints": CHECKPOINTS,
    "asynchronous": ASYNCHRONOUS,
    "asynchronous_checkpoints": {**ASYNCHRONOUS, **CHECKPOINTS},
    "lora": LORA,
    "lora_asynchronous": {**LORA, **ASYNCHRONOUS},
    "critic": {**CRITIC, "critic.share_backbone": False},
    "shared_critic": {**CRITIC, "critic.share_backbone": True},
    "offload": OFFLOAD,
    "offload_asynchronous": {**OFFLOAD, **ASYNCHRONOUS, **CHECKPOINTS},
    "reference": {"actor.kl_ctl": 0.01},
}


@pytest.fixture(scope="module")
def emulated(build_dir):
    return functools.partial(run, build_dir / "cuda_emulation" / "bough")


def run(program, folder, *arguments, ok=True, **environment):
    done = subprocess.run(
        [program, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=900,
        check=False,
        env={**os.environ, **ENVIRONMENT, **{name: str(value) for name, value in environment.items()}},
    )
    assert not ok or done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done


@pytest.fixture(scope="module")
def model(emulated, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    emulated(folder, "data", "sums", "--out", "train.jsonl", "-n", 40, "--max-operand", 9)
    emulated(folder, "init", "base", "--hidden-size", 256, "--layers", 3, "--heads", 4, "--kv-heads", 2)
    # With the default, page tables for the longest sequences would be a large part of so small a run.
    config = folder / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 512}))
    return folder


def train(emulated, folder, memory, ok=True, withheld=0):
    """Returns the process's result and its peak of device memory."""
    peak = folder / "peak"
    peak.unlink(missing_ok=True)
    device = {"BOUGH_EMULATED_CUDA": 1, "BOUGH_EMULATED_MEMORY": memory, "BOUGH_EMULATED_PEAK": peak}
    name = f"trial_name={memory}"
    done = emulated(folder, "train", "run.yaml", name, ok=ok, BOUGH_EMULATED_WITHHELD=withheld, **device)
    return done, int(peak.read_text())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_peak_is_that_of_the_plan_and_one_percent_decides(name, emulated, model, tmp_path):
    for file in ("base", "train.jsonl"):
        (tmp_path / file).symlink_to(model / file)
    (tmp_path / "run.yaml").write_text(to_yaml({**SETTINGS, **CONFIGURATIONS[name]}))
    plan = json.loads(emulated(tmp_path, "plan", "--run", "run.yaml", "--device", "h100", "--json").stdout)
    rows = {row["what"]: row["device_bytes"] for row in plan["rows"] if row["what"] not in NOT_EMULATED}
    assumed = sum(row["device_bytes"] for row in plan["rows"] if row["note"] == "assumed")
    planned = sum(rows.values()) - assumed
    _, peak = train(emulated, tmp_path, ENOUGH)
    assert peak <= planned <= 1.1 * peak, f"planned {planned}, measured {peak}, {rows}"

    # On the emulated device all memory is free when the run starts.
    others = sum(row["device_bytes"] for row in plan["rows"] if row["what"] in NOT_EMULATED)
    least = (plan["least_device_bytes"] - others) / (1 - RESERVE)
    refused, _ = train(emulated, tmp_path, math.floor(0.99 * least), ok=False)
    assert refused.returncode == 2
    assert "device memory: the run takes at least" in refused.stderr
    memory = math.ceil(1.01 * least)
    train(emulated, tmp_path, memory, withheld=assumed + int(RESERVE * memory))

"""The cookbook's recipes sl_loop and rl_loop, unchanged, with a small random model in place of Qwen3-8B."""

import json
import os
import subprocess
import sys

import pytest
from recipe_data import write_datasets
from tinker_util import Service
from tiny_models import write_tiny_model

NAME = "Qwen/Qwen3-8B"  # the cookbook knows its chat format


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    write_tiny_model(folder / NAME, "qwen3")
    write_datasets(folder)
    return folder


@pytest.fixture(scope="module")
def served(program, folder):
    with Service(program, folder / NAME, folder, f"served_model_name=[{NAME}]") as one:
        yield one


def run(recipe, served, folder, *settings):
    log = folder / f"log-{recipe}-{len(list(folder.iterdir()))}"
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", f"base_url={served.url}"]
    command += [f"model_name={NAME}", "lora_rank=4", f"log_path={log}", *settings]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_sl_loop_learns_unchanged(served, folder):
    steps = run(
        "sl_loop", served, folder, "batch_size=8", "max_steps=3", "learning_rate=0.02", "save_every=2"
    )
    losses = [step["train_mean_nll"] for step in steps if "train_mean_nll" in step]
    assert len(losses) == 3 and losses[2] < losses[0]


def test_rl_loop_runs_unchanged(served, folder):
    steps = run(
        "rl_loop", served, folder, "batch_size=4", "group_size=4", "max_tokens=8", "max_steps=2",
        "loss_fn=importance_sampling", "save_every=1",
    )  # fmt: skip
    assert [step["progress/batch"] for step in steps if "progress/batch" in step] == [0, 1]

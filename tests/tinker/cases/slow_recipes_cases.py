"""RL with the cookbook's rl_loop, unchanged: a real model learns sums."""

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from recipe_data import write_datasets
from serve_util import Served

ROOT = Path(__file__).resolve().parents[3]
NAME = "Qwen/Qwen3-8B"  # the cookbook knows its chat format, which is that of SmolLM2-Instruct
TAUGHT, STEPS = 9, 20  # steps
EPOCH = 5  # steps: the last ones have the problems of the first ones


@pytest.fixture(scope="module")
def real_model(program, tmp_path_factory):
    """SmolLM2-135M-Instruct."""
    folder = tmp_path_factory.mktemp("real")
    variables = {**os.environ, "BOUGH": str(program), "DEMO_DIR": str(folder)}
    subprocess.run([ROOT / "scripts" / "demo_real", "--model"], env=variables, check=True, timeout=900)
    return folder / "model"


def serve(program, folder, name):
    settings = ["--train", f"folder={folder / name}", f"served_model_name=[{NAME}]", "--dtype", "bf16"]
    threads = {"OMP_NUM_THREADS": str(os.cpu_count()), "OMP_WAIT_POLICY": "passive"}
    return Served(program, folder / NAME, *settings, env=threads)


def run(recipe, served, folder, *settings):
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", f"base_url={served.url}"]
    command += [f"model_name={NAME}", "lora_rank=16", "save_every=0", f"log_path={log}", *settings]
    variables = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache")}  # each seed has its own data
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=2400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def rewards(served, folder, steps, learning_rate):
    found = run(
        "rl_loop", served, folder, "batch_size=8", "group_size=8", "max_tokens=32", f"max_steps={steps}",
        f"learning_rate={learning_rate}", "loss_fn=importance_sampling",
    )  # fmt: skip
    found = [step["reward/total"] for step in found if "reward/total" in step]
    assert len(found) == steps
    return found


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rl_loop_raises_the_reward(program, real_model, tmp_path, seed):
    """The model first learns to answer in \\boxed{}, from the answers only: 20% to 60% are right then."""
    shutil.copytree(real_model, tmp_path / NAME)
    write_datasets(tmp_path, count=32 * TAUGHT, most=10, seed=seed, epoch=8 * EPOCH)
    with serve(program, tmp_path, "taught") as served:
        run(
            "sl_loop", served, tmp_path, "batch_size=32", "learning_rate=2e-3",
            "train_on_what=last_assistant_message",
        )  # fmt: skip
    (adapter,) = (tmp_path / "taught").rglob("weights/final")
    subprocess.run([program, "merge", tmp_path / NAME, adapter, tmp_path / "merged"], check=True)
    shutil.rmtree(tmp_path / NAME)
    (tmp_path / "merged").rename(tmp_path / NAME)
    with serve(program, tmp_path, "trained") as served:
        taught = statistics.mean(rewards(served, tmp_path, 4, learning_rate=0))
        values = rewards(served, tmp_path, STEPS, learning_rate=3e-4)
    print(f"seed {seed}: taught {taught:.3f}, RL {values}")
    assert 0.2 < taught < 0.6
    assert statistics.mean(values[-EPOCH:]) > statistics.mean(values[:EPOCH]), values

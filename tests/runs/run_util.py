"""Helpers for tests of whole runs: a small experiment in a folder, and the parts of two runs that must be
equal."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from metric_table import name_pattern
from run_results import read_rollouts as read_rollouts

# Passes are short here, so one thread is faster. With one thread the results do not depend on the machine.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

# Prefixes of metrics that may differ between two runs with one seed (docs/numerics.md, "Reproducibility").
UNEQUAL = ("time/", "perf/", "memory/", "tree/predicted_over_measured")


def run_experiment(command: list[str], cwd: Path, out: Path) -> str:
    """What a script of bench/ prints. If it fails, the message has the logs in its folder `out`."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + "".join(path.read_text() for path in out.glob("*.log"))
    return done.stdout


def write_experiment(bough, **settings: Any) -> Path:
    """Writes data, a small model and config.yaml into the test's folder. Settings are dotted keys."""
    bough("data", "sums", "--out", "train.jsonl", "-n", 40, "--max-operand", 9, ok=True)
    bough("data", "sums", "--out", "valid.jsonl", "-n", 12, "--split", "test", "--max-operand", 9, ok=True)
    bough("init", "base", "--hidden-size", 32, "--layers", 2, "--heads", 2, "--kv-heads", 1, ok=True)
    defaults = {
        "experiment_name": "tiny",
        "model.path": "base",
        "train_dataset.path": "train.jsonl",
        "train_dataset.batch_size": 3,
        "valid_dataset.path": "valid.jsonl",
        "gconfig.n_samples": 4,
        "gconfig.max_new_tokens": 8,
        "actor.optimizer.lr": 1e-3,
        "evaluator.freq_steps": 4,
        "saver.freq_steps": 2,
        "total_train_steps": 7,
    }
    config = bough.cwd / "config.yaml"
    config.write_text(to_yaml({**defaults, **settings}))
    return config


def to_yaml(dotted: dict[str, Any]) -> str:
    """JSON is valid YAML."""
    nested: dict[str, Any] = {}
    for key, value in dotted.items():
        *groups, last = key.split(".")
        inner = nested
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return json.dumps(nested, indent=1)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl. Each metric must be in docs/metrics.md."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {name for record in records for name in record if name != "step"}
    unknown = sorted(name for name in names if not name_pattern().match(name))
    assert unknown == [], "not in docs/metrics.md"
    return records


def comparable_metrics(run: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in record.items() if not name.startswith(UNEQUAL)}
        for record in read_metrics(run)
    ]


def last_checkpoint(run: Path) -> Path:
    return run / "checkpoints" / (run / "latest").read_text().strip()


def final_state(run: Path) -> dict[str, bytes]:
    checkpoint = last_checkpoint(run)
    return {
        str(file.relative_to(checkpoint)): file.read_bytes()
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file()
    }

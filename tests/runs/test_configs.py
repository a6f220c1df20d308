"""Every settings file of configs/algorithms/ runs: two steps of a model of a few thousand weights."""

import math
from pathlib import Path

from run_util import ENVIRONMENT, read_metrics, write_experiment

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs/algorithms").glob("*.yaml"))

# So that the samples of a group differ.
REWARD = "def score(completion, **fields):\n    return float(sum(map(ord, completion)) % 3 == 0)\n"


def test_every_settings_file_runs(bough):
    write_experiment(bough)
    sizes = ("--hidden-size", 32, "--layers", 1, "--heads", 2, "--kv-heads", 1)
    bough("init", "teacher", *sizes, "--seed", 2, ok=True)
    bough("data", "sums", "--out", "examples.jsonl", "-n", 4, "--split", "example", ok=True)
    (bough.cwd / "reward.py").write_text(REWARD)
    small = {
        "model.path": "base",
        "train_dataset.path": "train.jsonl",
        "train_dataset.batch_size": 4,
        "valid_dataset.path": "valid.jsonl",
        "evaluator.at_start": "false",
        "evaluator.at_end": "false",
        "reward": "reward.py:score",
        "total_train_steps": 2,
        "threads": 1,
    }
    assert len(CONFIGS) > 15
    calibration = None
    for config in CONFIGS:
        assert len(config.read_text().splitlines()) <= 20, config
        settings = [f"{key}={value}" for key, value in small.items()]
        if "few_shot" in config.read_text():
            settings += [f"{name}_dataset.few_shot.path=examples.jsonl" for name in ("train", "valid")]
        if "teacher:" in config.read_text():
            settings.append("teacher.path=teacher")
        if calibration:
            settings.append(f"calibration={calibration}")
        bough("train", config, *settings, ok=True, env=ENVIRONMENT)
        run = bough.cwd / "runs" / config.stem / "trial0"
        calibration = calibration or run / "calibration.json"
        records = read_metrics(run)[-2:]
        assert [record["step"] for record in records] == [1, 2], config
        for record in records:
            assert all(math.isfinite(x) for x in record.values() if isinstance(x, float)), (config, record)
            assert record["optim/grad_norm"] > 0, config

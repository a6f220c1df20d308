"""Every settings file of configs/algorithms/ runs: two steps of a model of a few thousand weights."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from run_util import ENVIRONMENT, last_checkpoint, read_metrics, write_experiment

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs/algorithms").glob("*.yaml"))

# The rewards of a group's samples must differ.
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
        if "draft_path:" in config.read_text():
            settings.append("sparse_training.draft_path=teacher")
        if calibration:
            settings.append(f"calibration={calibration}")
        result = bough("train", config, *settings, ok=True, env=ENVIRONMENT)
        # Clips are written for runs with several optimizer steps a batch.
        _, _, rest = result.stderr.partition("these settings have no effect:\n")
        for line in itertools.takewhile(lambda line: line.startswith("  "), rest.splitlines()):
            assert line.endswith("no clip changes a gradient"), (config, line)
        run = bough.cwd / "runs" / config.stem / "trial0"
        calibration = calibration or run / "calibration.json"
        records = read_metrics(run)[-2:]
        assert [record["step"] for record in records] == [1, 2], config
        for record in records:
            assert all(math.isfinite(x) for x in record.values() if isinstance(x, float)), (config, record)
            assert record["optim/grad_norm"] > 0, config


def test_areals_settings_run_with_an_engine_rank_on_problems_that_a_script_makes(bough):
    """Ranks that generate and ranks that train, 1:1 instead of 3:1. The untrained model solves nothing."""
    write_experiment(bough)
    bough(
        "init", "base", "--hidden-size", 32, "--layers", 1, "--heads", 2, "--kv-heads", 1, "--force", ok=True
    )
    script = ROOT / "examples/code_problems.py"
    subprocess.run([sys.executable, script, "--out", bough.cwd / "code", "-n", "40"], check=True)
    problems = [json.loads(line) for line in (bough.cwd / "code/train.jsonl").read_text().splitlines()]
    questions = {
        json.loads(line)["question"] for line in (bough.cwd / "code/test.jsonl").read_text().splitlines()
    }
    assert len(problems) == 40 and not questions & {problem["question"] for problem in problems}
    for problem in problems:
        subprocess.run(
            [sys.executable, "-c", "\n".join([problem["answer"], *problem["test_list"]])], check=True
        )
    small = ["model.path=base", "dtype=fp32", "train_dataset.batch_size=4", "gconfig.n_samples=4"]
    small += ["gconfig.max_new_tokens=8", "total_train_steps=3", "rollout.ranks=1"]
    for name, data in (("areal_math", "train.jsonl"), ("areal_code", "code/train.jsonl")):
        words = [ROOT / f"configs/{name}.yaml", *small, f"train_dataset.path={data}", "--ranks", 2]
        result = bough("train", *words, ok=True, env=ENVIRONMENT)
        assert "no effect" not in result.stderr
        records = read_metrics(bough.cwd / f"runs/{name}/trial0")
        assert [record["step"] for record in records] == [1, 2, 3]
        assert all(record["reward/failures"] == record["reward/mean"] == 0 for record in records)


def test_the_weight_of_a_truncated_distribution_is_one(bough):
    """Samples with top_p 0.8 store their token's log-probability in the whole distribution, so unchanged
    weights have the ratio 1. The mass that top_p kept does not count: it would shrink every weight."""
    config = write_experiment(bough, **{"actor.correction": "tis", "actor.correction_upper": 1e6})
    bough("train", config, "gconfig.top_p=0.8", "total_train_steps=3", ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/trial0"
    records = [record for record in read_metrics(run) if "mismatch/factor_mean" in record]
    assert len(records) == 3
    for record in records:
        assert record["mismatch/factor_mean"] == pytest.approx(1, abs=1e-5)
        assert record["mismatch/importance_weight_mean"] == pytest.approx(1, abs=1e-5)
        assert record["mismatch/masked_fraction"] == record["mismatch/truncated_fraction"] == 0
    model = last_checkpoint(run) / "model"
    prompts = bough.cwd / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input_ids": [65 + i, 66, 67]}) + "\n" for i in range(8)))
    arguments = (
        "--model",
        model,
        "--prompts",
        prompts,
        "--out",
        "sampled.jsonl",
        "--n-samples",
        4,
        "--top-p",
        0.8,
    )
    bough("rollout", *arguments, "--max-new-tokens", 8, ok=True, env=ENVIRONMENT)
    kept = []
    for line in (bough.cwd / "sampled.jsonl").read_text().splitlines():
        row = json.loads(line)
        own = [x for x, m in zip(row["logprobs"], row["loss_mask"], strict=True) if m]
        kept += [math.exp(x - y) for x, y in zip(own, row["truncated_logprobs"], strict=True)]
    assert 0.75 < sum(kept) / len(kept) < 0.95, "the mass that is kept is not 1, else the test says nothing"


def test_remax_trains_on_the_difference_to_the_most_likely_response(bough):
    config = write_experiment(
        bough, **{"actor.adv_estimator": "remax", "reward": "reward.py:score", "evaluator.at_start": False}
    )
    (bough.cwd / "reward.py").write_text(REWARD)
    bough("train", config, "saver.rollouts=true", "total_train_steps=2", ok=True, env=ENVIRONMENT)
    run = bough.cwd / "runs/tiny/trial0"
    packed = run / "rollouts/step_1.jsonl.zst"
    arguments = ("step", "--model", "base", "--rollouts", packed, "--from-rewards", "--json")
    report = bough(*arguments, "actor.adv_estimator=remax", ok=True, env=ENVIRONMENT).json
    assert report["sequences"] == 12, "four samples of three problems, without the three baselines"
    assert bough(*arguments, ok=True, env=ENVIRONMENT).json["sequences"] == 12
    record = next(record for record in read_metrics(run) if record["step"] == 1)
    assert 0 <= record["reward/baseline_mean"] <= 1

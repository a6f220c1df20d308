"""bench/sparse_ablation.py: its verdicts, and one complete ablation on a tiny model."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from run_util import ENVIRONMENT, read_metrics

SCRIPT = Path(__file__).resolve().parents[2] / "bench/sparse_ablation.py"


@pytest.fixture(scope="module")
def ablation():
    spec = importlib.util.spec_from_file_location("sparse_ablation", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_verdicts_compare_with_the_dense_seeds(ablation):
    dense = [0.60, 0.62, 0.64]
    cases = [
        (0.61, 100, "equal"),
        (0.5901, 100, "equal"),
        (0.5899, 100, "worse"),
        (0.66, 100, "better"),
        (0.61, 49, "collapsed"),
        (0.45, 100, "collapsed"),
    ]
    for score, length, verdict in cases:
        assert ablation.judge(score, length, dense, 100, 0.5) == verdict, (score, length)
    # If the seeds of dense lie further apart, a mode may differ as much.
    assert ablation.judge(0.55, 100, [0.5, 0.6, 0.7], 100, 0.3) == "equal"


def test_a_small_ablation_runs_to_the_table_and_skips_finished_runs(bough):
    command = [sys.executable, str(SCRIPT), "--bough", str(bough.program), "--out", str(bough.cwd / "out")]
    command += shlex.split("--arms dense distill --seeds 1 --budgets 0.5 --steps 2 --prompts 2 --samples 4")
    command += shlex.split("--registers 2 --program-steps 3 12 --hidden-size 32 --layers 2 --dense-layers 0")
    command += shlex.split("--train-programs 20 --test-programs 3 --warm-programs 30 --warm-steps 4")
    command += shlex.split("--lessons 1:2:4:3 2:4:4:3 --lesson-programs 30")
    command += shlex.split(
        "--settings gconfig.ignore_eos=true gconfig.max_new_tokens=110 reward=reward.py:score"
    )
    (bough.cwd / "reward.py").write_text(
        "def score(completion, **fields):\n    return float(sum(map(ord, completion)) % 3 == 0)\n"
    )
    environment = {**os.environ, **ENVIRONMENT}

    def run():
        done = subprocess.run(command, cwd=bough.cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + "".join(
            path.read_text() for path in (bough.cwd / "out").glob("*.log")
        )
        return done.stdout

    table = run()
    out = bough.cwd / "out"
    rows = [line for line in table.splitlines() if line.startswith(("| dense", "| distill", "| warm"))]
    assert len(rows) == 3
    assert (out / "table.md").read_text() == table[:-1]
    # Reward and length of two modes, and acceptance of one.
    assert (out / "curves.svg").read_text().count("<polyline") == 5
    records = read_metrics(out / "trace/distill-0.5-seed1")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["rollout/active_pages"] < 1
        assert 0 < record["sparse/overlap_p5"] <= record["sparse/overlap"] < 1.0001
        assert record["sparse/ratio_p5_to_255"] <= 1 <= record["sparse/ratio_p95_to_255"]
        assert abs(record["sparse/overlap"] - record["sparse/acceptance"]) < 0.05
        assert record["time/recompute"] + record["time/update"] <= record["time/train"] + 1e-6
    scores = json.loads((out / "scores.json").read_text())
    assert set(scores) == {
        "warm/dense", "warm/0.5", "dense-seed1/dense", "dense-seed1/0.5",
        "distill-0.5-seed1/dense", "distill-0.5-seed1/0.5", "distill-0.5-seed1 phi/0.5",
    }  # fmt: skip
    before = {
        path: path.stat().st_mtime_ns for path in out.rglob("*") if path.suffix in (".jsonl", ".safetensors")
    }
    assert run() == table
    assert before == {path: path.stat().st_mtime_ns for path in before}

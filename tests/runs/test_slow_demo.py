"""The demos' settings with three seeds: training must learn what the demo promises."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run_demo(script, bough_program, folder, seed, timeout):
    """Runs a demo. Returns the summary that it prints last."""
    done = subprocess.run(
        [ROOT / "scripts" / script, "--json"],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={
            **os.environ,
            "BOUGH": str(bough_program),
            "DEMO_DIR": str(folder),
            "DEMO_SEED": str(seed),
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_demo_halves_the_error_rate(bough_program, tmp_path, seed):
    summary = run_demo("demo", bough_program, tmp_path / "demo", seed, 3000)
    before, after = summary["before"], summary["after"]
    assert 0.2 <= before["avg_at_k"] <= 0.5, summary
    assert after["avg_at_k"] >= before["avg_at_k"] + 0.5 * (1 - before["avg_at_k"]), summary
    assert after["interval"][0] > before["interval"][1], summary
    assert summary["compression"] > 2
    assert summary["seconds"] < summary["dense_seconds"]
    assert Path(ROOT / summary["report"]).stat().st_size > 0
    settings = (ROOT / "configs/sums.yaml").read_text()
    assert int(re.search(r"n_samples: (\d+)", settings)[1]) >= 8
    assert sum(1 for _ in (tmp_path / "demo/test.jsonl").open()) >= 500


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_real_model_learns_arithmetic(bough_program, tmp_path, seed):
    summary = run_demo("demo_real", bough_program, tmp_path / "demo", seed, 3000)
    assert summary["after"]["interval"][0] > summary["before"]["interval"][1], summary
    train, test = (
        {json.loads(line)["question"] for line in (tmp_path / f"demo/{name}.jsonl").open()}
        for name in ("train", "test")
    )
    assert len(test) == 200
    assert not train & test

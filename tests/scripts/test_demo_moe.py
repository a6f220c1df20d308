"""scripts/demo_moe with a tiny model: from upcycling to the table."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from host_env import copies_bf16_to_fp32

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/demo_moe"
SHAPE = ("--hidden-size", 32, "--layers", 2, "--heads", 2, "--kv-heads", 1, "--intermediate-size", 48)


@pytest.fixture
def demo(bough):
    """Runs the script. The model and the problems are there, so nothing is downloaded."""
    folder = bough.cwd / "demo"
    bough("init", "demo/model", "--arch", "llama", *SHAPE, ok=True)
    for name, split, count in (("train", "train", 40), ("test", "test", 12), ("examples", "example", 4)):
        bough("data", "sums", "--out", folder / f"{name}.jsonl", "-n", count, "--split", split, ok=True)
    small = shlex.split("--settings reward=number train_dataset.batch_size=3 gconfig.n_samples=4")

    def run(*words):
        command = [SCRIPT, "--demo", folder, "--out", bough.cwd / "out", "--sft-steps", "2", *words, *small]
        environment = {**os.environ, "BOUGH": str(bough.program), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return run


def rows(result):
    assert result.returncode == 0, result.stderr
    titles, _, *lines = [line.strip("| ").split(" | ") for line in result.stdout.splitlines()]
    return [dict(zip(titles, line, strict=True)) for line in lines]


def test_compares_modes_and_skips_what_is_finished(demo, tmp_path):
    first = demo("--steps", "2", "--arms", "none")
    (none,) = rows(first)
    assert none["routing_replay"] == "none" and none["seeds"] == "1"
    assert float(none["abs(log w)"]) > 0 or copies_bf16_to_fp32()
    assert float(none["abs(log w)"]) < 1 and 0 < float(none["effective sample size"]) <= 1
    assert none["routes that differ"] == "–"
    folder = tmp_path / "out/seed1-sft2"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    both = demo("--steps", "2")
    assert rows(both)[0] == none, "the finished run was changed"
    r3 = rows(both)[1]
    assert r3["routing_replay"] == "R3" and 0 <= float(r3["routes that differ"]) < 0.5
    assert both.stdout == (tmp_path / "out/table.md").read_text()
    assert before == {path: path.stat().st_mtime_ns for path in before}
    # A run that was interrupted after two of three steps is not in the table until it is resumed.
    assert rows(demo("--steps", "3", "--arms", "R3", "--table-only"))[0]["seeds"] == "0"
    resumed = demo("--steps", "3", "--arms", "R3")
    assert rows(resumed)[0]["seeds"] == "1" and "resum" in resumed.stderr, resumed.stderr


def test_a_failed_part_is_named_and_done_again(demo, tmp_path):
    shutil.move(tmp_path / "demo/test.jsonl", tmp_path / "demo/kept")
    (tmp_path / "demo/test.jsonl").write_text("no JSON\n")
    failed = demo("--steps", "2", "--arms", "R3")
    assert (
        failed.returncode == 1 and "test.jsonl" in failed.stderr and "the same call resumes" in failed.stderr
    )
    shutil.move(tmp_path / "demo/kept", tmp_path / "demo/test.jsonl")
    assert rows(demo("--steps", "2", "--arms", "R3"))[0]["seeds"] == "1"

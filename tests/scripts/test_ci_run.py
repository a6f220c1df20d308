""".ci/run always ends with the sum line, and passes a failure on."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITE_SUM = "@mkdir -p build/test-results; echo '{0}' | tee build/test-results/sum.txt"


@pytest.mark.parametrize(
    ("recipe", "passes", "last"),
    [
        (WRITE_SUM.format("5 passed, 0 failed, 1 skipped"), True, "5 passed, 0 failed, 1 skipped"),
        # make adds last lines of its own.
        (
            WRITE_SUM.format("5 passed, 1 failed, 0 skipped") + "; exit 1",
            False,
            "5 passed, 1 failed, 0 skipped",
        ),
        ("@echo error: does not compile; exit 1", False, "0 passed, 1 failed, 0 skipped"),
        ("@echo all is well", False, "0 passed, 1 failed, 0 skipped"),
        ('@read line || test "$$CI" = true; exit 1', False, "0 passed, 1 failed, 0 skipped"),
    ],
)
def test_the_last_line_is_the_sum(recipe: str, passes: bool, last: str, tmp_path: Path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "Makefile").write_text(f"ci:\n\t{recipe}\n")
    # The sum of an earlier run must not be taken for the sum of this run.
    (tmp_path / "build/test-results").mkdir(parents=True)
    (tmp_path / "build/test-results/sum.txt").write_text("9 passed, 0 failed, 0 skipped\n")
    done = subprocess.run(
        [tmp_path / ".ci" / "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        cwd="/",
        check=False,
    )
    assert done.stdout.splitlines()[-1] == last
    assert (done.returncode == 0) == passes

"""Libraries that the program opens at run time are refused if they are missing or of another build."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def installed(bough_program: Path, tmp_path: Path):
    """A copy of the program, whose folder lib is empty. `installed(*words)` runs it and returns stderr."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    program = shutil.copy(bough_program, tmp_path / "bin" / "bough")

    def run(*words: str) -> str:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path / "lib")}
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, env=environment, timeout=120, check=False
        )
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stderr

    run.lib = tmp_path / "lib"
    return run


def own_id(program: Path) -> str:
    [found] = set(re.findall(rb"bough build id ([0-9a-f]{16})", program.read_bytes()))
    return found.decode()


DECODE = ("bench", "rollout", "--model", "nothing", "--device", "cuda")


def test_the_cuda_library_of_another_build_is_refused(installed, bough_program: Path):
    (installed.lib / "libbough_cuda.so").write_text("bough build id 0123456789abcdef")
    message = installed(*DECODE)
    assert "libbough_cuda.so' is of another build: got build id 0123456789abcdef" in message
    assert f"expected {own_id(bough_program)}" in message and "build bough and bough_cuda" in message


def test_a_cuda_library_without_an_id_is_refused(installed):
    (installed.lib / "libbough_cuda.so").write_text("of a version without ids")
    assert "got no build id" in installed(*DECODE)


def test_the_kernels_of_another_build_are_refused(installed, bough_program: Path):
    own = own_id(bough_program)
    other = "0" * 16
    built = (bough_program.parents[1] / "lib" / "libbough_kernels.so").read_bytes()
    changed = built.replace(f"bough build id {own}".encode(), f"bough build id {other}".encode())
    assert changed != built
    (installed.lib / "libbough_kernels.so").write_bytes(changed)
    message = installed("bench", "rollout", "--model", "nothing")
    assert f"libbough_kernels.so is of another build: got build id {other}, expected {own}" in message
    assert "LD_LIBRARY_PATH" in message

"""scripts/build in a made-up checkout whose cmake and ninja only record their calls."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Checkout:
    def __init__(self, root: Path):
        self.root = root / "checkout"
        self.bin = root / "bin"
        self.bin.mkdir()
        (self.root / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "build", self.root / "scripts" / "build")
        shutil.copy(ROOT / "CMakePresets.json", self.root)
        (self.root / ".venv/lib/python3.11/site-packages/torch").mkdir(parents=True)
        target = "build bough_cuda: phony lib/libbough_cuda.so"
        self.program(
            self.root / ".venv/bin/cmake", f'echo configured >> calls\necho "{target}" > build/build.ninja'
        )
        self.program(self.root / ".venv/bin/ninja", 'echo "$@" >> calls')

    def program(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def build(self, *arguments: str) -> list[str]:
        """Returns the calls in order: "configured" for cmake, and the targets for ninja."""
        (self.root / "calls").unlink(missing_ok=True)
        subprocess.run(
            [self.root / "scripts/build", *arguments],
            env={**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "BOUGH_JOBS": "1"},
            check=True,
            timeout=60,
        )
        lines = (self.root / "calls").read_text().splitlines()
        return [line.removeprefix("-C build -j 1").removeprefix(" --quiet").strip() for line in lines]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_program_alone_is_built_in_the_folder_that_is_configured_for_all(checkout: Checkout):
    checkout.program(checkout.bin / "nvidia-smi", "exit 1")
    without_gpu = not Path("/dev/nvidia0").exists()
    program = "bough" if without_gpu else "bough bough_cuda"
    assert checkout.build("release", "bough") == ["configured", program]
    assert checkout.build() == [""]
    assert checkout.build("release", "bough") == [program]


def test_the_cuda_library_comes_with_the_program_where_a_gpu_is(checkout: Checkout):
    checkout.program(checkout.bin / "nvidia-smi", "exit 0")
    assert checkout.build("release", "bough") == ["configured", "bough bough_cuda"]
    assert checkout.build("release", "base_test") == ["base_test"]
    # A build folder without CUDA does not have the target bough_cuda.
    (checkout.root / "build/build.ninja").write_text("build bough: phony bin/bough\n")
    assert checkout.build("release", "bough") == ["bough"]

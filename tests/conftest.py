"""Fixtures that all Python tests share: the `bough` program, small random models, and environment variables
with which torch works."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from host_env import host_environment  # noqa: E402

# These variables are set before anything imports torch, since oneDNN reads them only once.
os.environ.update(host_environment())
# Oracles come from files that the tests write. Access to the network could only make a test flaky.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a file test_slow_x.py are slow. In other files a slow test is marked pytest.mark.slow."""
    for item in items:
        if item.path.name.startswith("test_slow_"):
            item.add_marker(pytest.mark.slow)


@dataclass
class Result:
    """The result of a process. `json` is the object on the last line of stdout, or None if that line is not
    JSON."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        lines = self.stdout.rstrip("\n").splitlines()
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"exit code {self.returncode}\nstdout:\n{self.stdout}\nstderr:\n{self.stderr}"


class Bough:
    """Runs the program that was built. `bough("plan", "--rollouts", path, "--json")` returns a Result. With
    `ok=True` the test fails, and shows all output, if the exit code is not 0."""

    def __init__(self, program: Path, cwd: Path):
        self.program = program
        self.cwd = cwd

    def __call__(
        self,
        *arguments: Any,
        ok: bool = False,
        timeout: float = 300,
        stdin: str = "",
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Result:
        done = subprocess.run(
            [str(self.program), *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            cwd=cwd or self.cwd,
            check=False,
            env={**os.environ, **(env or {})},
        )
        result = Result(done.returncode, done.stdout, done.stderr)
        if ok and done.returncode != 0:
            pytest.fail(f"bough {' '.join(map(str, arguments))}: {result}")
        return result

    def start(
        self, *arguments: Any, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen:
        """For tests that interrupt or kill a run. The caller ends the process."""
        return subprocess.Popen(
            [str(self.program), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd or self.cwd,
            env={**os.environ, **(env or {})},
        )


@pytest.fixture(scope="session")
def build_dir() -> Path:
    """The build under test: $BOUGH_BUILD_DIR, or build/."""
    return (ROOT / os.environ.get("BOUGH_BUILD_DIR", "build")).resolve()


@pytest.fixture(scope="session")
def bough_program(build_dir: Path) -> Path:
    program = build_dir / "bin" / "bough"
    if not os.access(program, os.X_OK):
        pytest.fail(f"{program} is not built: run `make build`")
    return program


@pytest.fixture
def bough(bough_program: Path, tmp_path: Path) -> Bough:
    """The program, with the test's own folder as its working directory."""
    return Bough(bough_program, tmp_path)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory):
    """`tiny_models("qwen3")` returns a directory with a small random model, written by transformers once a
    session. The names are the keys of tiny_models.ARCHITECTURES. Copy the directory before changing a
    file."""
    from tiny_models import write_tiny_model

    made: dict[str, Path] = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp("model") / architecture
            write_tiny_model(made[architecture], architecture)
        return made[architecture]

    return get

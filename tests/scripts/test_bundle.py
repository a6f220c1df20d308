"""The bundle of the build under test runs with the torch of .venv. Without a torch it says what is
missing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bundle(bough_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "bough"
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "bundle", "--build-dir", bough_program.parents[1], "--out", out],
        check=True,
    )
    return out


def start(bundle: Path, **environment: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH" and not k.startswith("BOUGH_")}
    return subprocess.run(
        [bundle / "bough", "--version"],
        env={**clean, "BOUGH_PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_runs_on_its_own_libraries_and_the_torch_it_finds(bundle: Path, bough_program: Path):
    done = start(bundle, LD_DEBUG="libs")
    built = subprocess.run([bough_program, "--version"], capture_output=True, text=True, check=True)
    assert (done.returncode, done.stdout) == (0, built.stdout), done.stderr[-2000:]
    ours = {path.name: path for path in (bundle / "lib").rglob("*.so*") if path.parent.name != "fallback"}
    assert any(name.startswith("libyaml-cpp") for name in ours)
    loaded = {Path(p) for p in re.findall(r"calling init: (\S+)", done.stderr)}
    # No library that the bundle contains was loaded from this machine instead.
    assert {path.resolve() for path in loaded if path.name in ours} <= set(ours.values())


def test_it_holds_nothing_of_the_machine_or_of_torch(bundle: Path):
    names = {path.name for path in bundle.rglob("*.so*")}
    forbidden = re.compile(r"lib(c|m|mvec|dl|pthread|torch\w*|c10\w*|gomp|cu\w+|nv\w+|mpi\w*)\.so")
    assert not [name for name in names if forbidden.match(name)]
    for binary in [*(bundle / "bin").glob("*/*"), *(bundle / "lib").glob("*/libbough_*")]:
        assert str(ROOT / ".venv").encode() not in binary.read_bytes(), (
            f"{binary} names this machine's folders"
        )
    assert (bundle / "LICENSE").exists() and any((bundle / "licenses").iterdir())


def test_without_torch_it_says_what_to_install(bundle: Path, tmp_path: Path):
    done = start(bundle, BOUGH_PYTHON="/nonexistent/python3")
    assert done.returncode == 2 and "torch==2.11.*" in done.stderr and "BOUGH_TORCH_DIR" in done.stderr
    done = start(bundle, BOUGH_TORCH_DIR=str(tmp_path))
    assert done.returncode == 2 and "libtorch_cpu.so" in done.stderr


def test_another_torch_is_refused_by_its_version(bundle: Path, tmp_path: Path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cpu.so").touch()
    (tmp_path / "version.py").write_text("__version__ = '2.10.1+cpu'\n")
    done = start(bundle, BOUGH_TORCH_DIR=str(tmp_path))
    assert done.returncode == 2 and f"built for torch 2.11; {tmp_path} is '2.10.1+cpu'" in done.stderr


def test_it_never_replaces_a_folder_that_is_no_bundle(bundle: Path, bough_program: Path, tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("years of work")
    command = [ROOT / "scripts" / "bundle", "--build-dir", bough_program.parents[1], "--out", tmp_path]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "is not a bundle" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def refused(folder: Path, **libraries: str) -> str:
    """What scripts/bundle says about a build folder with these texts for libraries."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").mkdir()
    (folder / "bin" / "bough").write_text("bough build id 0123456789abcdef")
    for name, text in libraries.items():
        (folder / "lib" / f"libbough_{name}.so").write_text(text)
    command = [ROOT / "scripts" / "bundle", "--build-dir", folder, "--out", folder / "out"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and not (folder / "out").exists()
    return done.stderr


def test_the_cuda_library_comes_with_that_of_nccl(bundle: Path, tmp_path: Path):
    names = {path.name for path in (bundle / "lib").glob("*/*")}
    assert "libbough_cuda.so" not in names or "libbough_nccl.so" in names
    same = "bough build id 0123456789abcdef"
    assert "build the target bough_nccl" in refused(tmp_path, cuda=same)


def test_libraries_of_another_build_are_refused(tmp_path: Path):
    other = "bough build id 0123456789abcdee"
    message = refused(tmp_path, cuda=other, nccl=other)
    assert "bough 0123456789abcdef, libbough_cuda.so 0123456789abcdee" in message

"""The wheel of the build under test is installed into a fresh environment with the torch of .venv. The
installed program trains without a compiler or this repository. If build-newest-torch/ is built, the wheel is
for its torch, too."""

import csv
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The programs that the launcher calls. No other program of the machine is on PATH.
TOOLS = ("dirname", "basename", "readlink", "sed", "grep")

NEWEST_TORCH = ROOT / "build-newest-torch"


def has_newest_torch() -> bool:
    return (NEWEST_TORCH / "lib" / "libbough_python.so").is_file()


SETTINGS = """
experiment_name: wheel
trial_name: first
model: { path: base }
train_dataset: { path: train.jsonl, batch_size: 4 }
gconfig: { n_samples: 2, max_new_tokens: 8 }
total_train_steps: 2
"""


@pytest.fixture(scope="module")
def wheel(bough_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [ROOT / "scripts" / "wheel", "--build-dir", bough_program.parents[1], "--out", out]
    if has_newest_torch():
        command += ["--build-dir", NEWEST_TORCH]
    subprocess.run([sys.executable, *command], check=True)
    [made] = out.iterdir()
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory):
    """`environment(*words)` runs a command of a fresh environment in its own folder, `.folder`. The
    environment's packages are in `.site`."""
    folder = tmp_path_factory.mktemp("fresh")
    venv, tools, work = folder / "venv", folder / "tools", folder / "work"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    [site] = venv.glob("lib/python3*/site-packages")
    [torch] = importlib.util.find_spec("torch").submodule_search_locations
    (site / "torch_of_the_tests.pth").write_text(str(Path(torch).parent) + "\n")
    tools.mkdir()
    work.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(shutil.which(name))

    # The kept variables only give the place of this machine's measurements, which would take a minute.
    kept = {
        name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME", "BOUGH_CACHE") if name in os.environ
    }

    def run(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [venv / "bin" / words[0], *words[1:]],
            env={"PATH": f"{venv}/bin:{tools}", "OMP_NUM_THREADS": "1", **kept},
            cwd=work,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    # --no-deps is absent on purpose: .venv must meet the wheel's requirements. The pip of .venv installs into
    # `venv`.
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", wheel], check=True)
    run.folder, run.site = work, site
    return run


def test_the_command_trains(environment):
    done = environment("bough", "--version")
    assert done.returncode == 0 and done.stdout.startswith("bough "), done.stderr
    (environment.folder / "settings.yaml").write_text(SETTINGS)
    for words in (
        "init base --hidden-size 32 --layers 2 --heads 2 --kv-heads 1",
        "data sums --out train.jsonl -n 20 --max-operand 9",
        "train settings.yaml",
    ):
        done = environment("bough", *words.split())
        assert done.returncode == 0, f"{words}: {done.stderr}"
    [metrics] = environment.folder.glob("runs/**/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) >= 2


def test_rewards_run_in_the_python_of_the_environment(environment):
    (environment.folder / "reward.py").write_text(
        "import sys\n\n\ndef score(prompt, completion, answer, **fields):\n"
        "    open('interpreter.txt', 'w').write(sys.prefix)\n    return 0.0\n"
    )
    (environment.folder / "settings.yaml").write_text(SETTINGS + "reward: reward.py:score\n")
    for words in (
        "init base --hidden-size 32 --layers 2 --heads 2 --kv-heads 1 --force",
        "data sums --out train.jsonl -n 20 --max-operand 9",
        "train settings.yaml trial_name=reward total_train_steps=1",
    ):
        done = environment("bough", *words.split())
        assert done.returncode == 0, f"{words}: {done.stderr}"
    prefix = (environment.folder / "interpreter.txt").read_text()
    assert Path(prefix) == environment.site.parents[2]


def test_exit_code_and_message_are_the_programs(environment):
    done = environment("bough", "trian")
    assert done.returncode == 2 and "did you mean train?" in done.stderr


def test_without_torch_it_says_what_to_install(environment):
    [link] = environment.site.glob("torch_of_the_tests.pth")
    text = link.read_text()
    link.unlink()
    try:
        done = environment("bough", "--version")
    finally:
        link.write_text(text)
    assert done.returncode == 2 and "torch==2.11.*" in done.stderr


def test_the_wheel_is_well_formed(wheel: Path):
    assert re.fullmatch(r"bough-[\d.]+-py3-none-manylinux_2_\d+_x86_64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [record] = [name for name in names if name.endswith("/RECORD")]
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        assert [row[0] for row in rows] == names
        for name, digest, size in rows[:-1]:
            content = archive.read(name)
            expected = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={expected}", len(content))
        assert archive.getinfo("bough/bundle/bin/torch-2.11/bough").external_attr >> 16 & 0o111
        metadata = archive.read(record.replace("RECORD", "METADATA")).decode()
        newest = [f"2.{minor}.*" for minor in (12, 13, 14)]
        expected = ">=2.11.0,!=" + ",!=".join(newest) + ",<2.16" if has_newest_torch() else ">=2.11.0,<2.12"
        assert f"Requires-Dist: torch{expected}\n" in metadata
        [requirement] = re.findall(r"^gguf==\S+", (ROOT / "requirements.txt").read_text(), re.M)
        assert f"Requires-Dist: {requirement}\n" in metadata
        points = archive.read(record.replace("RECORD", "entry_points.txt")).decode()
        assert "[verl.plugins]\nbough = bough.verl\n" in points
        assert not [name for name in names if re.search(r"lib(torch|c10|cu|nv)\w*\.so", name)]


def test_the_wheel_has_every_library_of_the_build(wheel: Path, bough_program: Path):
    builds = {"torch-2.11": bough_program.parents[1]}
    if has_newest_torch():
        builds["torch-2.15"] = NEWEST_TORCH
    with zipfile.ZipFile(wheel) as archive:
        packed = {Path(name) for name in archive.namelist() if "/libbough_" in name}
    for torch, build in builds.items():
        ours = {path.name for path in packed if path.parent.name == torch}
        assert ours == {path.name for path in (build / "lib").glob("libbough_*.so")}
        assert "libbough_cuda.so" not in ours or "libbough_nccl.so" in ours
    assert {path.parent.name for path in packed} == set(builds)


def test_whoever_builds_the_cuda_library_gets_that_of_nccl(bough_program: Path):
    """scripts/build and scripts/wheel name only the target bough_cuda."""
    build = bough_program.parents[1]
    if not re.search(r"^build bough_cuda: phony", (build / "build.ninja").read_text(), re.M):
        pytest.skip("this build was configured without nvcc")
    command = [ROOT / ".venv/bin/ninja", "-C", build, "-t", "inputs", "bough_cuda"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "lib/libbough_nccl.so" in done.stdout.split()


def test_a_build_for_this_machine_alone_is_refused(bough_program: Path, tmp_path: Path):
    cache = "CMAKE_CXX_FLAGS:STRING=-O2 -march=native\n"
    (tmp_path / "CMakeCache.txt").write_text(cache)
    command = [sys.executable, ROOT / "scripts" / "wheel", "--build-dir", tmp_path, "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode != 0 and "-march=native" in done.stderr and not (tmp_path / "out").exists()


TEN_LINES = """
import sys
import bough
assert "torch" not in sys.modules
import torch
from transformers import LlamaConfig, LlamaForCausalLM

shape = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **shape))
allocated = torch.empty(1 << 20).data_ptr()
engine = bough.TreeEngine(model)
prompt = [5, 6, 7, 8]
log_probs, entropies = engine([(prompt, [10, 11]), (prompt, [12])])
(-log_probs.mean()).backward()
assert all(p.grad is not None for p in model.parameters())
[path] = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
libraries = {line.split()[-1] for line in open("/proc/self/maps") if "libbough_" in line}
print("loaded", *sorted(name.rsplit("/", 1)[-1] for name in libraries), sys.modules["bough"].__file__)
print("torch", torch.__version__)
"""


def test_the_package_computes_gradients(environment):
    """Beside the environment's torch, with one OpenMP library in the process."""
    done = environment("python", "-c", TEN_LINES)
    assert done.returncode == 0, done.stderr
    assert "loaded libbough_kernels.so libbough_python.so" in done.stdout
    assert str(environment.site) in done.stdout


@pytest.mark.skipif(
    not has_newest_torch(), reason="build-newest-torch/ is not built: scripts/build newest-torch"
)
def test_beside_the_newest_torch_it_computes_and_trains(environment, tmp_path):
    """The same wheel, beside the torch of .venv-newest-torch."""
    [link] = environment.site.glob("torch_of_the_tests.pth")
    [newest] = (ROOT / ".venv-newest-torch").glob("lib/python3*/site-packages")
    text = link.read_text()
    link.write_text(f"{newest}\n{text}")
    try:
        done = environment("python", "-c", TEN_LINES)
        assert done.returncode == 0, done.stderr
        assert (
            "loaded libbough_kernels.so libbough_python.so" in done.stdout and "\ntorch 2.15." in done.stdout
        )
        done = environment("bough", "init", "newest", "--hidden-size", "32", "--layers", "2")
        assert done.returncode == 0, done.stderr
        done = environment("bough", "doctor", "--json")
        assert json.loads(done.stdout)["build"]["torch"].startswith("2.15."), done.stderr
    finally:
        link.write_text(text)


def test_another_torch_is_refused_with_what_to_install(environment):
    code = "import torch; torch.__version__ = '2.9.1+cpu'; from bough.native import classes; classes()"
    done = environment("python", "-c", code)
    assert done.returncode != 0 and "got torch 2.9.1+cpu, expected torch 2.11" in done.stderr

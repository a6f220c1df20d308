"""scripts/setup in a made-up checkout with empty requirements: the faults that it repairs, and when it does
nothing."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALL_INSTALLED = '#!/bin/sh\nshift 2\nfor p; do printf "installed:%s " "$p"; done\n'


class Machine:
    """A checkout, and programs that come before the machine's own on PATH."""

    def __init__(self, root: Path):
        self.root = root / "checkout"
        self.bin = root / "bin"
        (self.root / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(ROOT / "scripts" / "setup", self.root / "scripts" / "setup")
        (self.root / "requirements.txt").write_text("# nothing\n")
        (self.root / "requirements-lock.txt").write_text("# nothing\n")
        (self.root / "requirements-peer-losses.txt").touch()
        self.program("dpkg-query", ALL_INSTALLED)
        self.free_disk(gib=100)

    def free_disk(self, gib: int) -> None:
        self.program("df", f"#!/bin/sh\necho Filesystem\necho disk 0 0 {gib * 1024 * 1024} 0% /\n")

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def setup(self) -> subprocess.CompletedProcess:
        return subprocess.run(
            [self.root / "scripts" / "setup", "--no-build"],
            env={**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def pretend_environment(self) -> None:
        """Makes an environment that scripts/setup takes for complete, because its checks import nothing."""
        (self.root / ".venv/bin").mkdir(parents=True)
        (self.root / ".venv/bin/python").symlink_to(sys.executable)
        self.put_wheels_there()
        requirements = [self.root / name for name in ("requirements.txt", "requirements-lock.txt")]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in requirements)).hexdigest()
        (self.root / ".venv/bough-requirements.sha256").write_text(digest + "\n")

    def put_wheels_there(self) -> None:
        """Makes the files of the pinned wheels that scripts/setup looks for."""
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        library = self.root / ".venv/lib" / version / "site-packages/torch/lib/libtorch_cpu.so"
        library.parent.mkdir(parents=True)
        library.touch()
        for name in ("cmake", "ninja"):
            (self.root / ".venv/bin" / name).write_text("#!/bin/sh\n")
            (self.root / ".venv/bin" / name).chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_it_repairs_a_half_made_environment_and_a_second_call_does_nothing(machine: Machine):
    # An interrupted copy or a removed Python leaves such an environment behind.
    (machine.root / ".venv/bin").mkdir(parents=True)
    (machine.root / ".venv/bin/python").symlink_to("/nonexistent/python3")
    done = machine.setup()
    assert done.returncode == 0 and ".venv is broken or incomplete" in done.stderr, done.stderr
    assert "installing pinned Python wheels" in done.stderr
    subprocess.run([machine.root / ".venv/bin/python", "-c", "import pip"], check=True)
    machine.put_wheels_there()

    done = machine.setup()
    assert (done.returncode, done.stderr) == (0, "")

    # If the requirements change, they are installed again in the same environment.
    (machine.root / "requirements.txt").write_text("# other\n")
    done = machine.setup()
    assert "installing pinned Python wheels" in done.stderr and "broken" not in done.stderr
    assert machine.setup().stderr == ""


def test_a_disk_too_small_for_the_wheels_is_said_before_they_are_fetched(machine: Machine):
    machine.free_disk(gib=3)
    done = machine.setup()
    assert done.returncode == 1 and "3 GiB are free" in done.stderr, done.stderr
    assert "installing" not in done.stderr and not (machine.root / ".venv").exists()


def test_without_rights_it_prints_the_one_command_and_stops(machine: Machine):
    machine.program(
        "dpkg-query", '#!/bin/sh\nprintf "installed:g++ installed:make config-files:git "; exit 1\n'
    )
    machine.program("id", "#!/bin/sh\necho 1000\n")
    machine.program("sudo", "#!/bin/sh\nexit 1\n")
    machine.program("apt-get", "#!/bin/sh\necho called >&2\n")
    done = machine.setup()
    assert done.returncode == 1 and "called" not in done.stderr
    command = next(line for line in done.stderr.splitlines() if "apt-get install" in line)
    packages = command.split("--no-install-recommends ")[1].split()
    assert "libyaml-cpp-dev" in packages and "git" in packages and not {"g++", "make"} & set(packages)
    assert not (machine.root / ".venv").exists()


def test_with_sudo_it_installs_what_is_missing_in_one_call(machine: Machine):
    machine.program(
        "dpkg-query", '#!/bin/sh\nshift 2\nfor p; do [ "$p" = g++ ] || printf "installed:%s " "$p"; done\n'
    )
    machine.program("id", "#!/bin/sh\necho 1000\n")
    machine.pretend_environment()
    machine.program("sudo", '#!/bin/sh\n[ "$1" = -n ] && shift\nexec "$@"\n')
    machine.program("apt-get", f'#!/bin/sh\necho "$@" >> {machine.root}/calls\n')
    assert machine.setup().returncode == 0
    calls = (machine.root / "calls").read_text().splitlines()
    assert len(calls) == 2 and calls[0].endswith("update") and calls[1].endswith(" g++")


def test_a_failed_installation_shows_why_and_stops(machine: Machine):
    machine.program("dpkg-query", "#!/bin/sh\nexit 1\n")
    machine.program("id", "#!/bin/sh\necho 0\n")
    machine.program("apt-get", '#!/bin/sh\necho "E: no space left"; exit 100\n')
    done = machine.setup()
    assert done.returncode == 1 and "no space left" in done.stderr and "could not install" in done.stderr

"""The build under test and its commands, for tests that plant faults in the sources."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = Path(os.environ.get("BOUGH_BUILD_DIR", ROOT / "build"))
NINJA = ROOT / ".venv" / "bin" / "ninja"


def last_command(target):
    """The command that builds a target, without ninja's changes of folder and of the list of headers."""
    listed = subprocess.run(
        [NINJA, "-C", BUILD, "-t", "commands", "-s", os.path.relpath(target, BUILD)],
        capture_output=True,
        text=True,
        check=True,
    )
    parts = listed.stdout.strip().splitlines()[-1].split(" && ")
    return next(part for part in parts if "c++" in part or "clang++" in part)


def run_command(command):
    done = subprocess.run(["bash", "-c", command], cwd=BUILD, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

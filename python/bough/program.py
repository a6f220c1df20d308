"""The program `bough` beside this package. No torch is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

PACKAGE = Path(__file__).resolve().parent


def library_folder() -> Path:
    """The folder of libbough_python.so: that of the installed wheel, $BOUGH_BUILD_DIR/lib, or the build folder of
    the checkout that contains this file."""
    if (named := os.environ.get("BOUGH_BUILD_DIR")) is not None:
        return Path(named) / "lib"
    bundled = PACKAGE / "bundle" / "lib"
    return bundled if bundled.is_dir() else PACKAGE.parent.parent / "build" / "lib"


def program() -> Path:
    """The command of the wheel's bundle, or the program in the build folder."""
    launcher = PACKAGE / "bundle" / "bough"
    return launcher if launcher.is_file() else library_folder().parent / "bin" / "bough"


def environment() -> dict[str, str]:
    """The environment in which the program finds the torch and the Python of this environment."""
    env = dict(os.environ)
    torch = importlib.util.find_spec("torch")  # found without being loaded
    if "BOUGH_TORCH_DIR" not in env and torch and torch.submodule_search_locations:
        env["BOUGH_TORCH_DIR"] = torch.submodule_search_locations[0]
    env.setdefault("BOUGH_PYTHON", sys.executable)  # rewards in Python and `bough import` run there
    return env


def run() -> NoReturn:
    path = str(program())
    os.execve(path, [path, *sys.argv[1:]], environment())

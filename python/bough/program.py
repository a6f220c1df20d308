"""The program `bough` beside this package. No torch is imported."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

PACKAGE = Path(__file__).resolve().parent


def installation() -> Path:
    """The folder with lib/: the wheel's bundle, $BOUGH_BUILD_DIR, or of a bundle or a checkout that contains
    this file."""
    if (named := os.environ.get("BOUGH_BUILD_DIR")) is not None:
        return Path(named)
    above = PACKAGE.parent.parent
    candidates = [PACKAGE / "bundle", above, above / "build"]
    return next((folder for folder in candidates if (folder / "lib").is_dir()), candidates[-1])


def library_folders() -> dict[str, Path]:
    """The folders of libbough_python.so, by the version of torch that the library is for, such as 2.11. A
    build folder has one, a bundle one for each version."""
    folder = installation()
    try:
        return {(folder / "torch_version").read_text().strip(): folder / "lib"}
    except FileNotFoundError:
        folders = sorted((folder / "lib").glob("torch-*"), key=lambda path: (len(path.name), path.name))
        return {path.name.removeprefix("torch-"): path for path in folders}


def program() -> Path:
    """The launcher of a bundle, or the program of a build folder."""
    launcher = installation() / "bough"
    return launcher if launcher.is_file() else installation() / "bin" / "bough"


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

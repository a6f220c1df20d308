"""Loads libbough_python.so, which registers the classes torch.classes.bough.*."""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from bough import TORCH_CAME_FIRST
from bough.program import installation, library_folders

_PREFIX = "bough.UserError: "  # kUserError in src/python/tree_engine.h
Function = TypeVar("Function", bound=Callable[..., Any])


class UserError(ValueError):
    """Wrong input or use. The message says what, where, got, expected and the remedy. Nothing was
    changed."""


@functools.cache
def classes() -> Any:
    """torch.classes.bough. Loads the library at the first call."""
    library = _library()
    _load_dependencies(library)
    torch.ops.load_library(library)
    if torch.ops.bough.apply_cpu_workarounds() and TORCH_CAME_FIRST:
        warnings.warn(
            "this CPU's hypervisor hides the size of its AMX tiles, and PyTorch's bf16 products may die of "
            "SIGILL. bough has set ONEDNN_MAX_CPU_ISA, which has no effect if PyTorch has computed a "
            "product before; import bough before torch, or set the variable in the environment "
            "(docs/numerics.md)",
            stacklevel=2,
        )
    return torch.classes.bough


def _library() -> Path:
    """The library for the torch of this process."""
    folders = library_folders()
    version = torch.__version__
    folder = folders.get(version.split("+")[0].rsplit(".", 1)[0])
    if folders and folder is None:
        newest = list(folders)[-1]
        raise ImportError(
            f"bough: got torch {version}, expected torch {' or '.join(folders)}, for which this build is "
            f"compiled; install one of them, such as `pip install 'torch=={newest}.*'`"
        )
    if folder is None or not (folder / "libbough_python.so").is_file():
        raise ImportError(
            f"bough: no libbough_python.so in {str(folder or installation() / 'lib')!r}; build it with `make "
            "build`, name a build folder in BOUGH_BUILD_DIR, or install the wheel"
        )
    return folder / "libbough_python.so"


def _load_dependencies(library: Path) -> None:
    """Loads the libraries beside it and those of others that it needs, each after its own dependencies."""
    if not library.parent.name.startswith("torch-"):
        return  # a build folder: the library knows where its dependencies are
    waiting = list(library.parent.parent.glob("*.so*"))
    waiting.append(library.parent / "libbough_kernels.so")
    while waiting:
        missing = []
        for path in waiting:
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
            except OSError:
                missing.append(path)
        if len(missing) == len(waiting):
            break  # load_library() names what is missing
        waiting = missing


def raises_user_errors(function: Function) -> Function:
    """The library's UserError as the exception UserError."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            text = str(error)
            if _PREFIX not in text:
                raise
            raise UserError(text.split(_PREFIX, 1)[1].split("\nException raised from")[0].strip()) from None

    return wrapped  # type: ignore[return-value]

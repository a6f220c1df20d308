"""A command of scripts/ as a module. Its file has no suffix, so `import` does not find it."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType


def load_script(name: str) -> ModuleType:
    """Runs scripts/NAME, except its main(), as a new module."""
    loader = SourceFileLoader(f"script_{name}", str(Path(__file__).resolve().parents[1] / "scripts" / name))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module

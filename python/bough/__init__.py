"""Bough: RL post-training of language models over prefix trees.

A batch of rollouts is a tree: samples of one prompt share its tokens. Bough computes each shared token once,
forward and backward, with the gradients of the flat batch.

    engine = bough.TreeEngine(model)                       # a transformers model, weights in place
    log_probs, entropies = engine(sequences)               # differentiable; then loss.backward() as usual
    engine.step(sequences, loss_fn)                        # or: the loss runs inside the plan's execution
    print(bough.plan(sequences, model=model))              # what a batch would gain
    bough.train("run.yaml", reward=my_function)            # a whole run: the program, started from Python

`import bough` loads neither torch nor the library. The first use of a name that needs them does.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bough.native import UserError as UserError
    from bough.plans import PlanReport as PlanReport
    from bough.plans import plan as plan
    from bough.runs import ProgramError as ProgramError
    from bough.runs import Server as Server
    from bough.runs import TrainResult as TrainResult
    from bough.runs import rollout as rollout
    from bough.runs import serve as serve
    from bough.runs import train as train
    from bough.sequences import sequences_from_padded as sequences_from_padded
    from bough.tree_engine import Support as Support
    from bough.tree_engine import TreeEngine as TreeEngine
    from bough.tree_engine import supports as supports

TORCH_CAME_FIRST = "torch" in sys.modules

_NAMES = {
    "PlanReport": "bough.plans",
    "ProgramError": "bough.runs",
    "Server": "bough.runs",
    "TrainResult": "bough.runs",
    "Support": "bough.tree_engine",
    "TreeEngine": "bough.tree_engine",
    "UserError": "bough.native",
    "plan": "bough.plans",
    "rollout": "bough.runs",
    "sequences_from_padded": "bough.sequences",
    "serve": "bough.runs",
    "supports": "bough.tree_engine",
    "train": "bough.runs",
}

__all__ = sorted([*_NAMES, "main"])


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'bough' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def main() -> None:
    """The command `bough`: becomes the program, beside the torch of this environment."""
    from bough.program import run

    run()

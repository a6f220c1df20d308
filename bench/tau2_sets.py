"""Batches of tau2-bench's conversations: those of the table in docs/tau2.md, "Trees", and the sets of
bench/step_vs_peers.py. bench/tau2_trees.py makes them, in the environment of `scripts/setup_venv tau2`."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from peers import BENCH, ROOT

PYTHON = ROOT / ".venv-tau2/bin/python"
HOW_TO_GET = "`scripts/setup_venv tau2` installs tau2-bench"


@dataclass(frozen=True)
class Batch:
    """`samples` conversations for each of the first `tasks` tasks of a domain, in the order of their hash.

    user: "" the agent works alone | "scripted" (telecom) | "served", which stands for a model: it says why it
    calls, and has nothing to add.
    slips: the share of the expert's turns with a mistake. The reference calls (agent "gold") of a task are
    always the same, so more samples would be copies.
    """

    domain: str
    user: str
    agent: str
    tasks: int
    samples: int = 1
    skip: int = 0  # tasks that are left out at the beginning

    @property
    def slips(self) -> float:
        return 0.12 if self.agent == "expert" else 0.0

    @property
    def name(self) -> str:
        tasks = f"{self.skip}to{self.skip + self.tasks}" if self.skip else f"{self.tasks}"
        return f"{self.domain}_{self.user or 'alone'}_{self.agent}_{tasks}x{self.samples}"


# The batches of the table, by the most conversations that are taken of each task.
TABLE = [
    Batch("telecom", "", "expert", 30, 16),
    Batch("telecom", "scripted", "expert", 30, 16),
    Batch("telecom", "", "gold", 30),
    Batch("telecom", "scripted", "gold", 30),
    Batch("airline", "served", "gold", 30),
    Batch("retail", "served", "gold", 30),
]
# Sets of at most 200,000 tokens: the batch, and whether each turn is a sequence.
SETS = {
    "tau2_telecom": (Batch("telecom", "", "expert", 2, 8), False),
    "tau2_telecom_turns": (Batch("telecom", "scripted", "expert", 1, 3, skip=7), True),
    "tau2_retail_turns": (Batch("retail", "served", "gold", 2), True),
}


def write_sets(names, folder: Path) -> dict[str, Path]:
    """Makes the named sets, with byte pairs of tau2's own text, and returns their files."""
    command = [PYTHON, "-B", BENCH / "tau2_trees.py", "sets", *names, "--out", folder]
    command += ["--conversations", folder]  # not those of an earlier version of the agents
    subprocess.run([str(word) for word in command], check=True)
    return {name: folder / f"{name}.jsonl" for name in names}

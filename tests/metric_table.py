"""The tables of docs/metrics.md: the names of all metrics, and their names in other trainers."""

import itertools
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"


@dataclass(frozen=True)
class Row:
    names: tuple[str, ...]
    peers: dict[str, list[str]] = field(hash=False, default_factory=dict)  # by the column's title


def expand(name: str) -> list[str]:
    """age_{0,1}/{a,b} stands for four names."""
    parts = [part.split(",") for part in re.split(r"[{}]", name)]
    fixed = [[",".join(part)] if i % 2 == 0 else part for i, part in enumerate(parts)]
    return ["".join(words) for words in itertools.product(*fixed)]


@cache
def metric_rows() -> tuple[Row, ...]:
    rows, peers = [], []
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "metric":
            peers = cells[3:]
        elif line.startswith("| `") and len(cells) == 3 + len(peers):
            names = [name for span in re.findall(r"`([^`]+)`", cells[0]) for name in expand(span)]
            rows.append(
                Row(
                    tuple(names),
                    {
                        peer: re.findall(r"`([^`]+)`", cell)
                        for peer, cell in zip(peers, cells[3:], strict=True)
                    },
                )
            )
    return tuple(rows)


@cache
def metric_names() -> frozenset[str]:
    return frozenset(name for row in metric_rows() for name in row.names)


@cache
def name_pattern() -> re.Pattern:
    """NAME stands for a name in a run, N for a number."""
    patterns = [
        re.escape(name).replace("NAME", r"[\w.-]+") + "$" if not name.endswith("_N") else name[:-1] + r"\d+$"
        for name in metric_names()
    ]
    return re.compile("|".join(patterns))

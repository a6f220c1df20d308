"""docs/metrics.md against the sources: every metric that the code writes is in a table, every row of a table
is written by the code, and TRL's names are those of the installed TRL."""

import importlib.util
import re
from collections import Counter
from pathlib import Path

from metric_table import metric_names, metric_rows, name_pattern

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("algo", "control", "run", "train")  # they write metrics; two files of serve do too
INTERNAL = {
    "factor_square_mean": "becomes effective_sample_size",
    "importance_weight_square_mean": "becomes effective_sample_size",
    "nll": "of bough sft, which writes no metrics.jsonl",
}


def source_strings() -> set[str]:
    """The string literals of the sources that write metrics."""
    files = [ROOT / "src/serve/agent_server.h", ROOT / "src/serve/agent_sessions.cpp"]
    for folder in FOLDERS:
        files += (path for path in (ROOT / "src" / folder).rglob("*.[ch]*") if "_test" not in path.name)
    found: set[str] = set()
    for path in files:
        code = re.sub(r"^\s*//.*|^#include.*", "", path.read_text(), flags=re.M)
        found.update(re.findall(r'"((?:[^"\\\n]|\\.)*)"', code))
    return found


def is_composed(name: str, pieces: set[str], most: int = 4) -> bool:
    """Whether the name is a series of at most this many strings."""
    if name == "":
        return True
    return most > 0 and any(
        name[:end] in pieces and is_composed(name[end:], pieces, most - 1) for end in range(1, len(name) + 1)
    )


def test_every_metric_that_the_code_names_is_in_a_table():
    named = {text for text in source_strings() if re.fullmatch(r"[a-z][a-z_0-9]*/[a-z_0-9]+", text)}
    assert len(named) > 100
    # A text that ends in _ is continued by a number or a name.
    missing = [
        name
        for name in sorted(named)
        if name.split("/")[1] not in INTERNAL
        and not any(known.startswith(name) for known in metric_names() if name.endswith("_"))
        and not name_pattern().match(name)
    ]
    assert missing == [], "not in docs/metrics.md"


def test_every_row_of_a_table_is_written_by_the_code():
    # Reasons for which groups are refused are written with spaces in the code.
    pieces = {text.replace(" ", "_") for text in source_strings()}
    pieces |= {text.split("/")[0] for text in pieces if text.split("/")[-1] in INTERNAL}
    pieces = {"NAME", "N"} | {
        text for text in pieces if re.fullmatch(r"[a-z_0-9/]+", text) and (len(text) > 1 or text == "/")
    }
    missing = [name for name in sorted(metric_names()) if not is_composed(name, pieces)]
    assert missing == [], "no code writes them"


def test_a_metric_has_one_row():
    counts = Counter(name for row in metric_rows() for name in row.names)
    assert [name for name, count in counts.items() if count > 1] == []


def test_the_names_of_trl_are_those_of_the_installed_trl():
    folder = Path(importlib.util.find_spec("trl").submodule_search_locations[0])
    code = (folder / "trainer" / "grpo_trainer.py").read_text()
    names = {name.removeprefix("eval_") for row in metric_rows() for name in row.peers.get("TRL", [])}
    assert len(names) > 15
    written = {re.sub(r"\{\w+\}", "NAME", text) for text in re.findall(r'"([\w/{}]+)"', code)}
    # transformers' Trainer logs these two.
    assert names - written - {"grad_norm", "learning_rate"} == set()

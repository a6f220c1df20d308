"""bench/workload.py: the exact bytes of the sets that the tables of README.md were measured on."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from workload import SETS, Sequence, Workload, count_tree_tokens, write_set  # noqa: E402


# sequences, tokens, tree tokens, C, and the output of `sha256sum` for the file
@pytest.mark.parametrize(
    ("name", "sequences", "tokens", "tree_tokens", "compression", "digest"),
    [
        ("group", 16, 10316, 3148, 3.28, "487df6036aa50dcc59e8544914a56be0fe32154ba0813d6dfa3c07d950949f94"),
        (
            "agentic",
            64,
            63127,
            4791,
            13.18,
            "5b4d034afecd6b2042c012567900c3a80f8d303ce6056aefa01a9a9b3a32402d",
        ),
        (
            "agentic_leaf",
            16,
            24038,
            7000,
            3.43,
            "02b5e072018a96a89ffd7c86c57890ef0a2af2bb906a0ab51ec0ba9c0e18bf4f",
        ),
        ("flat", 8, 3031, 3031, 1.0, "b5de1eb9188110b062033012ad28919ff87d5309fce12d33b8b0c8c13bd055ee"),
    ],
)
def test_the_sets_of_the_tables(tmp_path, name, sequences, tokens, tree_tokens, compression, digest):
    found = write_set(SETS[name], tmp_path / "set.jsonl")
    assert (found["sequences"], found["tokens"], found["tree_tokens"]) == (sequences, tokens, tree_tokens)
    assert round(found["C"], 2) == compression
    assert hashlib.sha256((tmp_path / "set.jsonl").read_bytes()).hexdigest() == digest


def test_tree_tokens_are_the_distinct_prefixes(tmp_path):
    rows = [[1, 2, 3], [1, 2], [1, 2, 3], [2, 2, 3], [1, 4]]
    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert count_tree_tokens([Sequence(0, row, 0) for row in rows]) == len(prefixes) == 7


def test_the_command_writes_what_the_function_writes(tmp_path):
    workload = Workload("agentic", prompts=3, n=5, plen=20, turns=4, rlen=10, vocab=99)
    write_set(workload, tmp_path / "function.jsonl", seed=7)
    options = ["--shape", "agentic", "--prompts", "3", "--n", "5", "--plen", "20"]
    options += ["--turns", "4", "--rlen", "10", "--vocab", "99", "--seed", "7"]
    command = [sys.executable, ROOT / "bench/workload.py", *options, "--out", tmp_path / "command.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stderr)["sequences"] == 60
    assert (tmp_path / "command.jsonl").read_bytes() == (tmp_path / "function.jsonl").read_bytes()
    row = json.loads((tmp_path / "command.jsonl").read_text().splitlines()[3])
    untrained = row["loss_mask"].index(1)
    assert row["loss_mask"] == [0] * untrained + [1] * (len(row["input_ids"]) - untrained)
    assert min(row["input_ids"]) >= 5 and max(row["input_ids"]) < 99 and -1 <= row["advantage"] < 1

"""Kinds of errors in a run's samples of the task `trace` (bench/sparse_ablation.py), by step.

  python3 bench/trace_errors.py runs/sparse_ablation/runs/NAME --steps 40 55 60
  python3 bench/trace_errors.py runs/sparse_ablation/runs/NAME          # all steps, and their sum

A line of a worked answer has three parts: `Ab+d 4+2=6 a9b6c1d2e7`, the step of the program, its computation,
and all registers after it. The first error of a sample is in the first line that differs from the worked
answer, in the first part of it that differs:

  step          the wrong step of the program
  computation   a wrong operand or result
  registers     registers copied wrongly
  end           the final number, a missing line, or one too many

Correction by tokens (DistillSparse, equation 2) leaves a token out with the probability 1 - min(1, r). r is
the dense policy's probability divided by the engine's. The last two columns have the mean of this probability
over the first wrong tokens of the failing samples, and over all their tokens.
"""

import argparse
import collections
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from run_results import read_rollouts

KINDS = ["step", "computation", "registers", "end"]


def first_error(answer, completion):
    """(kind, number of bytes of `completion` before the first wrong one), or None if both are equal."""
    right, given = answer.strip(), completion.strip()
    if right == given:
        return None
    same = 0
    while same < min(len(right), len(given)) and right[same] == given[same]:
        same += 1
    *_, line = right[:same].split("\n")
    is_in_a_line = right.find("\n", same) >= 0 and same < len(given)
    kind = KINDS[line.count(" ")] if is_in_a_line else "end"
    return kind, same + len(completion) - len(completion.lstrip())


class Errors:
    """Counts over samples."""

    def __init__(self):
        self.samples = 0
        self.kinds = collections.Counter()
        self.first_left_out = []
        self.left_out = []

    def add(self, row):
        self.samples += 1
        error = first_error(row["answer"], row["completion"])
        if error is None:
            return
        kind, place = error
        self.kinds[kind] += 1
        left_out = [1 - min(1.0, math.exp(mismatch)) for mismatch in row.get("token_mismatch", [])]
        self.left_out += left_out
        self.first_left_out += left_out[place : place + 1]

    def row(self, name):
        left_out = (self.first_left_out, self.left_out)
        means = [f"{statistics.mean(part):.4f}" if part else "–" for part in left_out]
        counts = [self.samples, self.kinds.total(), *(self.kinds[kind] for kind in KINDS)]
        return "| " + " | ".join(map(str, [name, *counts, *means])) + " |"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", help="default: all steps")
    args = parser.parse_args()
    files = {int(file.name.split(".")[0][5:]): file for file in args.run.glob("rollouts/step_*.jsonl.zst")}
    missing = sorted(set(args.steps or []) - set(files))
    if missing or not files:
        step = missing[0] if missing else "1"
        raise SystemExit(f"{args.run}/rollouts: no file of step {step}; it has files of {len(files)} steps")
    columns = [
        "step of training",
        "samples",
        "wrong",
        *KINDS,
        "first wrong token left out",
        "any token left out",
    ]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    total = Errors()
    for step in args.steps or sorted(files):
        errors = Errors()
        for row in read_rollouts(files[step]):
            errors.add(row)
            total.add(row)
        print(errors.row(step))
    print(total.row("all"))


if __name__ == "__main__":
    main()

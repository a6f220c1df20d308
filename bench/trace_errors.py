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
import os
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
    same = len(os.path.commonprefix([right, given]))
    is_in_a_line = right.find("\n", same) >= 0 and same < len(given)
    kind = KINDS[right[:same].rpartition("\n")[2].count(" ")] if is_in_a_line else "end"
    return kind, same + len(completion) - len(completion.lstrip())


def examine(sample):
    """None if the sample is right, else (kind of its first error, probability that the correction leaves out
    the first wrong token [at most one value], the same of all tokens)."""
    error = first_error(sample["answer"], sample["completion"])
    if error is None:
        return None
    kind, place = error
    left_out = [1 - min(1.0, math.exp(mismatch)) for mismatch in sample.get("token_mismatch", [])]
    return kind, left_out[place : place + 1], left_out


def table_row(name, examined):
    """examined: what `examine` returned for each sample."""
    wrong = [found for found in examined if found is not None]
    kinds = collections.Counter(kind for kind, _, _ in wrong)
    counts = [len(examined), len(wrong), *(kinds[kind] for kind in KINDS)]
    left_out = [[value for found in wrong for value in found[part]] for part in (1, 2)]
    means = [f"{statistics.mean(values):.4f}" if values else "–" for values in left_out]
    return "| " + " | ".join(map(str, [name, *counts, *means])) + " |"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", help="default: all steps")
    args = parser.parse_args()
    files = {
        int(file.name.split(".")[0].removeprefix("step_")): file
        for file in args.run.glob("rollouts/step_*.jsonl.zst")
    }
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
    total = []
    for step in args.steps or sorted(files):
        examined = [examine(sample) for sample in read_rollouts(files[step])]
        print(table_row(step, examined))
        total += examined
    print(table_row("all", total))


if __name__ == "__main__":
    main()

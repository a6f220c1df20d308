#!/usr/bin/env python3
"""Measures how the time of a gradient step grows with the tokens of a tree of constant depth.

Generates 1 to 56 groups (8 samples of 128 tokens after a prompt of 128: 1,152 tree tokens per group). Times
`bough step` on each number of groups, interleaved. Prints microseconds per token and their ratio to those of
the smallest set. If no model is given, the model has shape `small` and random weights.
"""

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from peers import add_bough, init_model, parser_of, run_json
from workload import Workload, write_set

GROUP = Workload("group", n=8, plen=128, rlen=128)


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="Hugging Face directory, vocabulary 4,096 or more")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 56])
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions (3)")
    add_bough(parser)
    args = parser.parse_args()

    seconds = {(dtype, groups): [] for dtype in args.dtypes for groups in args.groups}
    tokens = {}
    with tempfile.TemporaryDirectory(prefix="step_growth_") as folder:
        for groups in args.groups:
            write_set(replace(GROUP, prompts=groups), Path(folder) / f"{groups}.jsonl")
        if args.model is None:
            args.model = Path(folder) / "model"
            init_model(args.bough, args.model, "small")
        for _ in range(args.rounds):
            for dtype, groups in seconds:
                command = [args.bough, "step", "--model", args.model, "--dtype", dtype, "--json"]
                command += ["--rollouts", Path(folder) / f"{groups}.jsonl"]
                report = run_json(command)
                seconds[dtype, groups].append(report["seconds_per_step"])
                tokens[groups] = report["tree_tokens"]
    print("dtype  tree tokens  seconds  microseconds / token  ratio to first")
    for (dtype, groups), runs in seconds.items():
        median = statistics.median(runs)
        each = median / tokens[groups]
        first = statistics.median(seconds[dtype, args.groups[0]]) / tokens[args.groups[0]]
        print(f"{dtype:<6} {tokens[groups]:>11,}  {median:7.3f}  {1e6 * each:20.1f}  {each / first:14.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Times one gradient step, compared with a dense Hugging Face trainer and AReaL-DTA's engine.

Runs `bough step` and bench/peer_step.py, interleaved, on the same generated rollout sets (bench/workload.py)
and the same weights. Prints medians over the rounds with their spread. A ratio above 1 means that Bough is
faster: `auto` and `path` against AReaL-DTA, `dense` against transformers' dense step, `auto` against `dense`.
With --memory, `auto_memory` is measured too: `auto` with this budget instead of the activations of one pass.
Every measurement is a separate process with one uncounted warm-up. If a contender's loss differs from
Bough's, the contender computed something else, and the benchmark fails.

The sets tau2_* are conversations of tau2-bench (bench/tau2_sets.py; docs/tau2.md, "Trees"). They need the
environment that `scripts/setup_venv tau2` installs. Without it, the script says so and leaves them out.

Memory above weights and gradients is the process's peak resident size minus that of the same step on a set of
a few tokens. This baseline holds almost only weights, gradients and libraries. It applies to all contenders.

`make bench-peers` runs this script with the pinned peers. AReaL-DTA needs AREAL_DTA_DIR, a folder with
areal/experimental/dta of AReaL's branch feat/dta. Without it, the script says so and skips AReaL-DTA. Results
go to a table on stdout and to --out as JSON.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from peers import (
    BENCH,
    BOUGH_SHAPES,
    ROOT,
    TORCH_DTYPES,
    VOCAB,
    add_program_options,
    aligned,
    check_programs,
    parser_of,
    peers_environment,
    run_json,
    say,
)
from tau2_sets import HOW_TO_GET
from tau2_sets import PYTHON as TAU2_PYTHON
from tau2_sets import SETS as TAU2_SETS
from tau2_sets import write_sets as write_tau2_sets
from workload import QUICK_SETS, SETS, write_set

# Tolerance of the loss, divided by log(vocabulary size), the order of magnitude of a log-probability.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
SHAPES = [*BOUGH_SHAPES, "0.6b"]
CONTENDERS = ["auto", "path", "dta", "dense", "transformers"]
# Pairs (Bough's contender, its baseline).
PAIRS = [
    ("auto", "dta"),
    ("auto_memory", "dta"),
    ("path", "dta"),
    ("dense", "transformers"),
    ("auto", "dense"),
]


@dataclasses.dataclass
class Bench:
    """State shared by all runs."""

    args: argparse.Namespace
    folder: Path  # holds the generated sets and the model
    environment: dict

    def run(self, command):
        return run_json(command, self.environment)

    def peer_step(self, rollouts, peer, dtype, *words):
        shared = ["--model", self.args.shape, "--vocab", VOCAB, "--threads", self.args.threads]
        command = [self.args.python, "-B", BENCH / "peer_step.py", rollouts, "--peer", peer]
        return self.run([*command, "--dtype", TORCH_DTYPES[dtype], *shared, *words])

    def make_set(self, name, workload):
        path = self.folder / f"{name}.jsonl"
        write_set(workload, path)
        return path

    def make_model(self):
        """The peers' random weights. They come from a fixed seed, so they are equal in every process."""
        path = self.folder / "model"
        rollouts = self.make_set("model", QUICK_SETS["flat"])
        self.peer_step(rollouts, "dense", "fp32", "--warm", 0, "--save-model", path)
        return path

    def measure(self, contender, model, rollouts, dtype):
        """Returns seconds, loss and peak resident bytes of one run."""
        if contender in ("auto", "auto_memory", "path", "dense"):
            mode, _, budget = contender.partition("_")
            report = self.run(
                [self.args.bough, "step", "--model", model, "--rollouts", rollouts, "--mode", mode]
                + ["--dtype", dtype, "--threads", self.args.threads, "--repeat", 1, "--json"]
                + (["--memory", self.args.memory] if budget else [])
            )
            return report["seconds_per_step"], report["loss"], report["peak_rss_bytes"]
        peer = {"transformers": "dense", "dta": "dta"}[contender]
        report = self.peer_step(rollouts, peer, dtype)
        return report["s"], report["loss"], report["peak_rss_bytes"]


def parse_arguments():
    parser = parser_of(__doc__)
    parser.add_argument("--sets", nargs="+", choices=[*SETS, *TAU2_SETS], default=[*SETS, *TAU2_SETS])
    parser.add_argument("--dtypes", nargs="+", choices=TORCH_DTYPES, default=list(TORCH_DTYPES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--memory", metavar="BYTES", help="measure `auto` with this budget too, such as 1GiB")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions (3)")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="shape of the model (small)")
    parser.add_argument("--quick", action="store_true", help="smoke test: tiny sets and model, one round")
    add_program_options(parser)
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench/step_vs_peers.json")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: got {args.rounds}, expected at least 1")
    if args.memory:
        args.contenders.insert(
            args.contenders.index("auto") + 1 if "auto" in args.contenders else 0, "auto_memory"
        )
    if args.quick:
        args.shape, args.rounds = "tiny", 1
    args.sets = available_sets(args.sets, args.quick)
    if not args.sets:
        parser.error("--sets: none of them can be made here")
    return args


def available_sets(names, quick):
    """The names without tau2-bench's, if its environment is missing, or in a smoke test."""
    left_out = [name for name in names if name in TAU2_SETS]
    if not left_out or (TAU2_PYTHON.exists() and not quick):
        return names
    why = "they take minutes" if quick else f"there is no {TAU2_PYTHON}; {HOW_TO_GET}"
    say(f"step_vs_peers: left out {', '.join(left_out)}: {why}")
    return [name for name in names if name not in TAU2_SETS]


def measure_all(bench, sets, contenders):
    """{(set, dtype): {contender: [(seconds, loss, bytes over weights and gradients), ...]}}.

    A round runs every contender once.
    """
    model = bench.make_model()
    few_tokens = bench.make_set("few_tokens", QUICK_SETS["flat"])
    # The smaller of two runs: a first run of `auto` may calibrate the machine, which also takes memory.
    at_rest = {
        (dtype, contender): min(bench.measure(contender, model, few_tokens, dtype)[2] for _ in range(2))
        for dtype in bench.args.dtypes
        for contender in contenders
    }
    paths = {name: bench.make_set(name, sets[name]) for name in bench.args.sets if name in sets}
    if names := [name for name in bench.args.sets if name in TAU2_SETS]:
        paths |= write_tau2_sets(names, bench.folder)
    results = {
        (name, dtype): {contender: [] for contender in contenders}
        for name in bench.args.sets
        for dtype in bench.args.dtypes
    }
    for number in range(1, bench.args.rounds + 1):
        for (name, dtype), by_contender in results.items():
            for contender in contenders:
                seconds, loss, peak = bench.measure(contender, model, paths[name], dtype)
                by_contender[contender].append((seconds, loss, peak - at_rest[dtype, contender]))
            line = "  ".join(f"{contender} {runs[-1][0]:.3f}" for contender, runs in by_contender.items())
            say(f"round {number}/{bench.args.rounds}  {name} {dtype}: {line}")
    return results


def summarise(results):
    """One row per set and dtype: medians, spreads and ratios of seconds, and contenders with a wrong loss."""
    rows = []
    for (name, dtype), by_contender in results.items():
        row = {"set": name, "dtype": dtype, "contenders": {}, "ratios": {}, "wrong_losses": []}
        expected = next(iter(by_contender.values()))[0][1]
        for contender, runs in by_contender.items():
            seconds = [run[0] for run in runs]
            loss = runs[0][1]
            row["contenders"][contender] = {
                "median_s": statistics.median(seconds),
                "min_s": min(seconds),
                "max_s": max(seconds),
                "loss": loss,
                "memory_bytes": statistics.median(run[2] for run in runs),
            }
            if not abs(loss - expected) <= LOSS_TOLERANCE[dtype] * math.log(VOCAB):
                row["wrong_losses"].append(contender)
        for ours, peer in PAIRS:
            if ours in by_contender and peer in by_contender:
                median = {c: row["contenders"][c]["median_s"] for c in (ours, peer)}
                row["ratios"][f"{peer}/{ours}"] = median[peer] / median[ours]
        rows.append(row)
    return rows


def seconds_table(rows):
    """A table of seconds as median (min-max), then the ratios."""
    contenders = list(rows[0]["contenders"])
    ratios = list(rows[0]["ratios"])
    lines = [["set", "dtype", *contenders, *ratios]]
    for row in rows:
        cells = [row["set"], row["dtype"]]
        for contender in contenders:
            entry = row["contenders"][contender]
            cells.append(f"{entry['median_s']:.3f} ({entry['min_s']:.3f}-{entry['max_s']:.3f})")
        cells += [f"{row['ratios'][ratio]:.2f}" for ratio in ratios]
        lines.append(cells)
    return aligned(lines)


def memory_table(rows):
    contenders = list(rows[0]["contenders"])
    lines = [["set", "dtype", *contenders]]
    for row in rows:
        peaks = [f"{row['contenders'][c]['memory_bytes'] / 2**20:.0f}" for c in contenders]
        lines.append([row["set"], row["dtype"], *peaks])
    return aligned(lines)


def main():
    args = parse_arguments()
    check_programs(args)
    contenders = args.contenders
    if "dta" in contenders and not os.environ.get("AREAL_DTA_DIR"):
        contenders.remove("dta")
        say(
            "step_vs_peers: AReaL-DTA left out: AREAL_DTA_DIR does not name a checkout of its branch feat/dta"
        )
    with tempfile.TemporaryDirectory(prefix="step_vs_peers_") as folder:
        bench = Bench(args, Path(folder), peers_environment())
        rows = summarise(measure_all(bench, QUICK_SETS if args.quick else SETS, contenders))
    print("seconds a step, median (min-max); ratios above 1: Bough is faster")
    print(seconds_table(rows))
    print("\npeak memory over weights and gradients, MiB")
    print(memory_table(rows))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "time": time.strftime("%FT%TZ", time.gmtime()),
        "shape": args.shape,
        "rounds": args.rounds,
        "cpus": os.cpu_count(),
        "rows": rows,
    }
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {args.out}")
    wrong = [row for row in rows if row["wrong_losses"]]
    for row in wrong:
        others = ", ".join(row["wrong_losses"])
        say(
            f"step_vs_peers: {row['set']} {row['dtype']}: the loss differs from "
            f"that of {args.contenders[0]}: {others}"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Measures the cost of a sequence-level loss and of adapters, compared with the plain step.

Runs are interleaved; figures are medians over rounds. Each run is one process with one uncounted warm-up:
  token, sequence   `bough step` with PPO's clip and with GSPO (time at most 1.4x, the same peak memory)
  full, lora        `bough step`, policy gradient, with every weight and with an adapter on every linear layer
  dense, peft       transformers' dense step, without and with PEFT's adapter of this rank (peer_step.py)
The ratio full/lora is the gain of freezing the base weights. The ratio peft/lora divided by dense/full is the
part of Bough's lead over transformers that remains with adapters.

--python is a Python with torch and transformers. If it cannot import peft, the script says so and skips peft.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from peers import (
    BENCH,
    ROOT,
    TORCH_DTYPES,
    VOCAB,
    add_program_options,
    aligned,
    check_programs,
    peers_environment,
    run_json,
    say,
)
from workload import QUICK_SETS, SETS, write_set

CONTENDERS = ["token", "sequence", "full", "lora", "dense", "peft"]
RATIOS = [("sequence", "token"), ("full", "lora"), ("dense", "full"), ("peft", "lora")]


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["group"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repetitions (5)")
    parser.add_argument(
        "--shape", choices=["tiny", "small", "0.6b"], default="small", help="shape of the model (small)"
    )
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters (16)")
    parser.add_argument("--mode", default="auto", help="Bough's plan (auto)")
    parser.add_argument("--dtype", choices=TORCH_DTYPES, default="fp32")
    parser.add_argument("--quick", action="store_true", help="smoke test: tiny sets")
    add_program_options(parser)
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench/step_variants.json")
    return parser.parse_args()


def command_of(contender, args, model, rollouts):
    if contender in ("dense", "peft"):
        words = [
            args.python,
            "-B",
            BENCH / "peer_step.py",
            rollouts,
            "--peer",
            "dense",
            "--model",
            args.shape,
        ]
        words += ["--vocab", VOCAB, "--threads", args.threads, "--dtype", TORCH_DTYPES[args.dtype]]
        return words + (["--lora-rank", args.rank] if contender == "peft" else [])
    words = [args.bough, "step", "--model", model, "--rollouts", rollouts, "--mode", args.mode, "--json"]
    words += ["--dtype", args.dtype, "--threads", args.threads, "--repeat", 1]
    settings = {
        "token": ["actor.loss=ppo"],
        "sequence": ["actor.loss=gspo"],
        "full": [],
        "lora": [f"lora.rank={args.rank}", f"lora.alpha={2 * args.rank}"],
    }
    return words + settings[contender]


def has_peft(args):
    done = subprocess.run([args.python, "-c", "import peft"], env=peers_environment(), capture_output=True)
    return done.returncode == 0


def main():
    args = parse_arguments()
    check_programs(args)
    if "peft" in args.contenders and not has_peft(args):
        args.contenders.remove("peft")
        say(f"step_variants: PEFT left out: {args.python} cannot import peft")
    rows = []
    with tempfile.TemporaryDirectory(prefix="step_variants_") as folder:
        environment = peers_environment()
        model = Path(folder) / "model"
        few = Path(folder) / "few.jsonl"
        write_set(QUICK_SETS["flat"], few)
        make = command_of("dense", args, model, few)
        run_json([*make, "--warm", 0, "--save-model", model], environment)
        for name in args.sets:
            rollouts = Path(folder) / f"{name}.jsonl"
            write_set((QUICK_SETS if args.quick else SETS)[name], rollouts)
            seconds = {contender: [] for contender in args.contenders}
            peaks = {contender: [] for contender in args.contenders}
            for number in range(1, args.rounds + 1):
                for contender in args.contenders:
                    report = run_json(command_of(contender, args, model, rollouts), environment)
                    seconds[contender].append(report.get("seconds_per_step", report.get("s")))
                    peaks[contender].append(report["peak_rss_bytes"] / 2**20)
                latest = "  ".join(f"{c} {runs[-1]:.3f}" for c, runs in seconds.items())
                say(f"round {number}/{args.rounds}  {name}: {latest}")
            median = {c: statistics.median(runs) for c, runs in seconds.items()}
            ratios = {f"{a}/{b}": median[a] / median[b] for a, b in RATIOS if a in median and b in median}
            rows.append(
                {"set": name, "seconds": seconds, "peak_mib": peaks, "median": median, "ratios": ratios}
            )
    lines = [["set", *args.contenders, *rows[0]["ratios"]]]
    for row in rows:
        cells = [
            f"{row['median'][c]:.3f} ({min(row['seconds'][c]):.3f}-{max(row['seconds'][c]):.3f})"
            for c in args.contenders
        ]
        lines.append([row["set"], *cells, *(f"{x:.2f}" for x in row["ratios"].values())])
        lines.append(
            [
                "  MiB",
                *(f"{statistics.median(row['peak_mib'][c]):.0f}" for c in args.contenders),
                *("" for _ in row["ratios"]),
            ]
        )
    print(f"{args.shape} {args.dtype}, seconds a step: median (min-max); peak of the process")
    print(aligned(lines))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"shape": args.shape, "cpus": os.cpu_count(), "rows": rows}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measures the gain of asynchrony on this machine: interleaved pairs of runs that differ by one setting.

  sleeping       rewards take 0.1 to 2 s, one worker per sample: asynchronous / synchronous
  demo           the demo's training, rewards cost nothing, the same cores: asynchronous / synchronous
  interruption   lengths with a long tail: interruptible / not interruptible
  microbatches   dense, lengths with a long tail: dynamic / a fixed number of micro-batches
  prox           loglinear / recompute (prox_logp_method), four mini-batches

The measure is perf/effective_tokens_per_s: generated tokens that were trained on, divided by the wall time of
the steps after the first two. A ratio above 1 means that the first named run is faster.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from command_line import parser_of  # noqa: E402
from host_env import host_environment  # noqa: E402

SLEEPING_REWARD = """\
import hashlib, time

def score(completion, **fields):
    share = int(hashlib.sha256(completion.encode()).hexdigest()[:8], 16) / 2**32
    time.sleep(0.1 + 1.9 * share)
    return share
"""
ASYNCHRONOUS = "rollout.max_head_offpolicyness=2"
SYNCHRONOUS = "rollout.max_head_offpolicyness=0"
# An untrained model samples the end token with probability 1/272 per token: lengths have a geometric tail.
LONG_TAIL = ["model.path={demo}/base", "gconfig.max_new_tokens=1024"]
# Per pair: settings of the first run, of the second run, and of both.
PAIRS = {
    "sleeping": (
        [ASYNCHRONOUS],
        [SYNCHRONOUS],
        ["train_dataset.batch_size=8", "gconfig.n_samples=8", "reward=reward.py:score"]
        + ["reward_service.workers=64", "gconfig.max_new_tokens=64", "gconfig.ignore_eos=true"],
    ),
    "demo": ([ASYNCHRONOUS], [SYNCHRONOUS], []),
    "interruption": (
        ["rollout.interruptible=true"],
        ["rollout.interruptible=false"],
        [ASYNCHRONOUS, *LONG_TAIL, "train_dataset.batch_size=8", "rollout.max_concurrent_rollouts=128"],
    ),
    "microbatches": (
        ["actor.tree_training_mode=dense"],
        ["actor.tree_training_mode=dense", "actor.mb_spec.n_mbs=16", "actor.mb_spec.allocation=fixed"],
        [SYNCHRONOUS, *LONG_TAIL, "train_dataset.batch_size=4"],
    ),
    "prox": (
        ["actor.prox_logp_method=loglinear"],
        ["actor.prox_logp_method=recompute"],
        [ASYNCHRONOUS, "actor.ppo_n_minibatches=4"],
    ),
}


def parse_arguments():
    parser = parser_of(__doc__)
    parser.add_argument("pairs", nargs="*", help=f"pairs to run: {', '.join(PAIRS)} (default: all)")
    parser.add_argument("--bough", type=Path, default=os.environ.get("BOUGH") or ROOT / "build/bin/bough")
    parser.add_argument(
        "--demo", type=Path, default=ROOT / "runs/demo", help="the demo's folder: its warm model"
    )
    parser.add_argument("--steps", type=int, default=12, help="steps per run; the first two are not counted")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    unknown = set(args.pairs) - set(PAIRS)
    if unknown:
        parser.error(f"no pair is named {', '.join(sorted(unknown))}; expected {', '.join(PAIRS)}")
    if not (args.demo / "warm/model.safetensors").exists():
        parser.error(f"no warm model in {args.demo}: run `make demo` first, or name its folder with --demo")
    return args


def measure(args, folder, name, settings):
    """The run's effective tokens per second and mean staleness."""
    demo = args.demo.resolve()
    command = [str(args.bough), "train", str(ROOT / "configs/sums.yaml"), f"fileroot={folder}"]
    command += [f"trial_name={name}", f"model.path={demo}/warm", f"train_dataset.path={demo}/train.jsonl"]
    command += [f"train_dataset.few_shot.path={demo}/examples.jsonl", "valid_dataset.path="]
    command += [
        f"total_train_steps={args.steps}",
        "compare_dense=0",
        "saver.freq_steps=0",
        "saver.rollouts=false",
    ]
    environment = {**os.environ, **host_environment(), "OMP_WAIT_POLICY": "passive"}
    settings = [setting.format(demo=demo) for setting in settings]
    run = subprocess.run(command + settings, cwd=folder, env=environment, capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(
            f"exit code {run.returncode} from\n  {' '.join(command + settings)}\n{run.stderr[-2000:]}"
        )
    lines = (Path(folder) / "demo" / name / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][2:]
    tokens = sum(step["perf/effective_tokens_per_s"] * step["time/step"] for step in steps)
    seconds = sum(step["time/step"] for step in steps)
    return tokens / seconds, statistics.mean(step["staleness/mean"] for step in steps)


def main():
    args = parse_arguments()
    print(
        f"{'pair':<14} {'first':>10} {'second':>10} {'ratio':>6}   staleness"
        f"  (tokens/s, medians of {args.rounds})"
    )
    for pair in args.pairs or PAIRS:
        first, second, both = PAIRS[pair]
        rates = {"first": [], "second": []}
        staleness = []
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "reward.py").write_text(SLEEPING_REWARD)
            for turn in range(args.rounds):
                for side, settings in (("first", first), ("second", second)):
                    rate, age = measure(args, folder, f"{side}{turn}", both + settings)
                    rates[side].append(rate)
                    if side == "first":
                        staleness.append(age)
        a, b = statistics.median(rates["first"]), statistics.median(rates["second"])
        print(
            f"{pair:<14} {a:>10.0f} {b:>10.0f} {a / b:>6.2f}   {statistics.mean(staleness):>9.2f}", flush=True
        )


if __name__ == "__main__":
    main()

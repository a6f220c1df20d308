#!/usr/bin/env python3
"""Measures the gain of asynchrony on this machine: interleaved pairs of runs that differ by one setting.

  sleeping       rewards take 0.1 to 2 s, one worker per sample: asynchronous / synchronous
  demo           the demo's training, rewards cost nothing, the same cores: asynchronous / synchronous
  interruption   lengths with a long tail (272 tokens in the mean, at most 1,024): interruptible / not
  interruption_long     the same with 1,024 tokens in the mean, at most 4,096
  interruption_waiting  `interruption` with the rewards of `sleeping`
  microbatches   dense, lengths with a long tail: dynamic / a fixed number of micro-batches
  microbatches_long     the same with the lengths of `interruption_long`
  prox           loglinear / recompute (prox_logp_method), four mini-batches

The measure is perf/effective_tokens_per_s: generated tokens that were trained on, divided by the wall time of
the steps after the first two. A ratio above 1 means that the first named run is faster. The peak resident
memory of both runs stands beside it.
"""

import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from command_line import add_bough, parser_of, run_bough  # noqa: E402
from run_results import read_metrics  # noqa: E402

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
# The same model with a vocabulary of 1,024 tokens.
LONGER_TAIL = ["model.path={folder}/base", "gconfig.max_new_tokens=4096"]
SLEEPS = ["reward=reward.py:score", "reward_service.workers=64"]
INTERRUPTION = ["rollout.interruptible=true"], ["rollout.interruptible=false"]
INTERRUPTED = [ASYNCHRONOUS, "train_dataset.batch_size=8", "rollout.max_concurrent_rollouts=128"]
MICROBATCHES = (
    ["actor.tree_training_mode=dense"],
    ["actor.tree_training_mode=dense", "actor.mb_spec.n_mbs=16", "actor.mb_spec.allocation=fixed"],
)
# Per pair: settings of the first run, of the second run, and of both.
PAIRS = {
    "sleeping": (
        [ASYNCHRONOUS],
        [SYNCHRONOUS],
        ["train_dataset.batch_size=8", "gconfig.n_samples=8", *SLEEPS]
        + ["gconfig.max_new_tokens=64", "gconfig.ignore_eos=true"],
    ),
    "demo": ([ASYNCHRONOUS], [SYNCHRONOUS], []),
    "interruption": (*INTERRUPTION, [*INTERRUPTED, *LONG_TAIL]),
    "interruption_long": (*INTERRUPTION, [*INTERRUPTED, *LONGER_TAIL]),
    "interruption_waiting": (*INTERRUPTION, [*INTERRUPTED, *LONG_TAIL, *SLEEPS]),
    "microbatches": (*MICROBATCHES, [SYNCHRONOUS, *LONG_TAIL, "train_dataset.batch_size=4"]),
    "microbatches_long": (*MICROBATCHES, [SYNCHRONOUS, *LONGER_TAIL, "train_dataset.batch_size=4"]),
    "prox": (
        ["actor.prox_logp_method=loglinear"],
        ["actor.prox_logp_method=recompute"],
        [ASYNCHRONOUS, "actor.ppo_n_minibatches=4"],
    ),
}


def parse_arguments():
    parser = parser_of(__doc__)
    parser.add_argument("pairs", nargs="*", help=f"pairs to run: {', '.join(PAIRS)} (default: all)")
    add_bough(parser)
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
    """The run's effective tokens per second, mean staleness, and peak memory in MiB."""
    demo = args.demo.resolve()
    words = ["train", ROOT / "configs/sums.yaml", f"fileroot={folder}", f"trial_name={name}"]
    words += [f"model.path={demo}/warm", f"train_dataset.path={demo}/train.jsonl"]
    words += [f"train_dataset.few_shot.path={demo}/examples.jsonl", "valid_dataset.path="]
    words += [f"total_train_steps={args.steps}", "compare_dense=0", "saver.freq_steps=0"]
    words += ["saver.rollouts=false"]
    words += [setting.format(demo=demo, folder=folder) for setting in settings]
    run_bough(args.bough, words, folder, OMP_WAIT_POLICY="passive")
    steps = read_metrics(folder / "demo" / name)[2:]
    tokens = sum(step["perf/effective_tokens_per_s"] * step["time/step"] for step in steps)
    seconds = sum(step["time/step"] for step in steps)
    age = statistics.mean(step["staleness/mean"] for step in steps)
    return tokens / seconds, age, steps[-1]["memory/peak"] / 2**20


def compare(args, folder, pair):
    """Measures the two runs of a pair in turn and prints a line."""
    first, second, both = PAIRS[pair]
    measured = {"first": [], "second": []}
    for turn in range(args.rounds):
        for side, settings in (("first", first), ("second", second)):
            measured[side].append(measure(args, folder, f"{pair}-{side}{turn}", both + settings))
    (a, age, memory), (b, _, other_memory) = (
        map(statistics.median, zip(*measured[side], strict=True)) for side in ("first", "second")
    )
    print(
        f"{pair:<20} {a:>10.0f} {b:>10.0f} {a / b:>6.2f}   {age:>9.2f}   {memory:.0f} and "
        f"{other_memory:.0f} MiB",
        flush=True,
    )


def main():
    args = parse_arguments()
    print(
        f"{'pair':<20} {'first':>10} {'second':>10} {'ratio':>6}   staleness   memory"
        f"  (tokens/s, medians of {args.rounds})"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "reward.py").write_text(SLEEPING_REWARD)
        words = ["init", "base", "--hidden-size", 128, "--layers", 3, "--heads", 4, "--kv-heads", 2]
        run_bough(args.bough, [*words, "--vocab-size", 1024], folder)
        for pair in args.pairs or PAIRS:
            compare(args, folder, pair)


if __name__ == "__main__":
    main()

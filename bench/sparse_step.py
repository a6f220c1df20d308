#!/usr/bin/env python3
"""Times whole steps of `distill` and of dense training by response length, and breaks the time down.

A model with random weights takes the same steps in both modes, interleaved. Its samples run to full length.
For each response length, the script prints median seconds of a step and of its parts: rollout, recomputation,
update and phi's step (phi: the sparse policy, theta: the policy). It also prints these ratios:

  step      dense step / distill step: the end-to-end gain of sparse rollouts
  rollout   the same ratio for generation alone; share: generation's share of the dense step
  phi       phi's step / (theta's update and recomputation), as the paper counts it (its Figure 7:
            distillation adds 55%), and then phi's step / theta's update alone

The times are time/* of the run's metrics (docs/formats.md).
"""

import shutil
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from command_line import add_bough, parser_of, run_bough  # noqa: E402
from run_results import read_metrics  # noqa: E402

TIMES = ["step", "rollout", "recompute", "update", "sparse_train"]


def parse_arguments():
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_bough(parser)
    add("--out", type=Path, default=ROOT / "runs/sparse_step")
    add("--lengths", type=int, nargs="+", default=[8192, 16384], help="tokens of a response")
    add("--samples", type=int, default=8, help="samples per step, all of one prompt")
    add("--budget", default="512")
    add("--steps", type=int, default=1, help="steps per run, all of them counted")
    add("--rounds", type=int, default=1, help="runs of each mode")
    add("--settings", nargs="*", default=[], help="further key=value settings of every run")
    add("--distill-settings", nargs="*", default=[], help="further settings of the runs with distill")
    add("--hidden-size", type=int, default=768)
    add("--layers", type=int, default=12)
    add("--heads", type=int, default=12)
    add("--kv-heads", type=int, default=4)
    add("--head-dim", type=int, default=64)
    add("--vocab-size", type=int, default=8192)
    return parser.parse_args()


def bough(args, *words):
    run_bough(args.bough, words, args.out)


def prepare(args):
    """Makes a model, problems and a reward that differs between samples. Deletes earlier results."""
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.out / "steps", ignore_errors=True)
    (args.out / "calibration.json").unlink(missing_ok=True)
    shape = ["--hidden-size", args.hidden_size, "--layers", args.layers, "--heads", args.heads]
    shape += ["--kv-heads", args.kv_heads, "--head-dim", args.head_dim, "--vocab-size", args.vocab_size]
    shape += ["--max-positions", 2 * max(args.lengths), "--dtype", "bf16", "--force"]
    bough(args, "init", "model", *shape)
    bough(args, "data", "trace", "--out", "problems.jsonl", "-n", 64)
    (args.out / "reward.py").write_text(
        "import hashlib\n\n\ndef score(completion, **fields):\n"
        "    return int(hashlib.sha256(completion.encode()).hexdigest()[:4], 16) / 65535\n"
    )


def run(args, mode, length, number):
    """Trains a run and returns the metrics of its steps."""
    name = f"{mode}-{length}-{number}"
    settings = {
        "fileroot": args.out,
        "experiment_name": "steps",
        "trial_name": name,
        "model.path": "model",
        "dtype": "bf16",
        "reward": "reward.py:score",
        "train_dataset.path": "problems.jsonl",
        "train_dataset.batch_size": 1,
        "valid_dataset.path": "",
        "gconfig.n_samples": args.samples,
        "gconfig.max_new_tokens": length,
        "gconfig.ignore_eos": "true",
        "total_train_steps": args.steps,
        "compare_dense": 0,
        "saver.freq_steps": 0,
        "saver.rollouts": "false",
        "stall_seconds": 100_000,
    }
    if (args.out / "calibration.json").exists():
        settings["calibration"] = "calibration.json"
    if mode == "distill":
        settings["sparse_training.mode"] = "distill"
        settings["rollout.sparse.budget"] = args.budget
        settings["actor.correction"] = "obrs"
        settings["gconfig.top_logprobs"] = 20
    folder = args.out / "steps" / name
    lines = [f"{key}={value}" for key, value in settings.items()]
    more = args.settings + (args.distill_settings if mode == "distill" else [])
    bough(args, "train", ROOT / "configs/trace.yaml", *lines, *more)
    if not (args.out / "calibration.json").exists():
        (args.out / "calibration.json").write_text((folder / "calibration.json").read_text())
    return [record for record in read_metrics(folder) if record["step"] > 0]


def main():
    args = parse_arguments()
    args.out = args.out.resolve()
    prepare(args)
    for length in args.lengths:
        records = {"dense": [], "distill": []}
        for number in range(args.rounds):
            for mode in records:
                records[mode] += run(args, mode, length, number)
        seconds = {}
        for mode, steps in records.items():
            for name in TIMES:
                seconds[mode, name] = statistics.median(step.get(f"time/{name}", 0.0) for step in steps)
            shown = ", ".join(f"{name} {seconds[mode, name]:.1f}" for name in TIMES)
            print(f"{length:,} tokens, {args.samples} samples, {mode}: seconds of {shown}", flush=True)
        update = seconds["distill", "update"]
        theta = update + seconds["distill", "recompute"]
        phi = seconds["distill", "sparse_train"]
        print(
            f"{length:,} tokens: "
            f"step {seconds['dense', 'step'] / seconds['distill', 'step']:.2f} times as fast, "
            f"rollout {seconds['dense', 'rollout'] / seconds['distill', 'rollout']:.2f} "
            f"(share {seconds['dense', 'rollout'] / seconds['dense', 'step']:.0%}), "
            f"phi {phi / theta:.0%} of theta's step ({phi / update:.0%} of theta's update alone)",
            flush=True,
        )


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measures reward against staleness: the demo's training at several eta with the naive and decoupled loss.

A step has four mini-batches (with one, pi equals pi_old and the losses do not differ). Each mini-batch uses a
quarter of the demo's learning rate, so that a step moves the policy about as far. With eta 0 the two losses
give the same bits, so only one is run. Each run is a folder under --out. Finished runs are skipped and
interrupted runs resume, so the experiment can be done in several calls. The script then prints these tables:
  - accuracy before and after with its 95% interval, seconds of training, mean staleness
  - accuracy at each evaluation, against samples and seconds
  - by token age, over all steps: share of tokens, effective sample size and clip fraction
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from host_env import host_environment  # noqa: E402
from run_results import read_metrics  # noqa: E402

GROUP = 16  # samples per prompt, as in configs/sums.yaml
UNBOUNDED = 1000  # eta without effect; the buffer is bounded instead
AGES = ["age_0", "age_1", "age_2", "age_3_to_4", "age_5_to_8", "age_9_up"]
LOSSES = {
    "decoupled": ["actor.use_decoupled_loss=true"],
    "naive": ["actor.use_decoupled_loss=false", "actor.recompute_logprob=false"],
}


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="\n".join(__doc__.splitlines()[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--bough", type=Path, default=os.environ.get("BOUGH") or ROOT / "build/bin/bough")
    parser.add_argument(
        "--demo", type=Path, default=ROOT / "runs/demo", help="the demo's folder: its warm model"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs/ablation")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument(
        "--lr", type=float, default=1.25e-4, help="learning rate; the demo has 5e-4, with one mini-batch"
    )
    parser.add_argument("--eta", type=int, nargs="+", default=[0, 1, 4, 8, UNBOUNDED])
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="seeds of every eta")
    parser.add_argument(
        "--more-seeds", type=int, nargs="*", default=[2, 3], help="further seeds of eta 0 and 4"
    )
    parser.add_argument("--table-only", action="store_true", help="only print the tables of existing runs")
    return parser.parse_args()


def folder_of(args, eta, loss, seed):
    return args.out / "ablation" / f"{loss}-eta{eta}-seed{seed}"


def run(args, eta, loss, seed):
    demo = args.demo.resolve()
    command = [str(args.bough), "train", str(ROOT / "configs/sums.yaml"), f"fileroot={args.out}"]
    command += [
        "experiment_name=ablation",
        f"trial_name={folder_of(args, eta, loss, seed).name}",
        f"seed={seed}",
    ]
    command += [f"model.path={demo}/warm", f"train_dataset.path={demo}/train.jsonl"]
    command += [f"train_dataset.few_shot.path={demo}/examples.jsonl", f"valid_dataset.path={demo}/test.jsonl"]
    command += [f"valid_dataset.few_shot.path={demo}/examples.jsonl", f"total_train_steps={args.steps}"]
    command += [
        "evaluator.freq_steps=50",
        "compare_dense=0",
        "actor.ppo_n_minibatches=4",
        f"actor.optimizer.lr={args.lr}",
    ]
    command += [f"rollout.max_head_offpolicyness={eta}", *LOSSES[loss]]
    if eta >= UNBOUNDED:
        command += ["rollout.max_buffered_groups=1536"]  # 32 batches
    environment = {**os.environ, **host_environment(), "OMP_WAIT_POLICY": "passive"}
    if subprocess.run(command, env=environment).returncode != 0:
        raise SystemExit(f"stopped at eta {eta}, {loss}, seed {seed}; the same command continues from there")


def row_of(folder, steps):
    records = read_metrics(folder)
    if not records or records[-1]["step"] < steps:
        return None
    evaluations = [record for record in records if "eval/avg_at_k" in record]
    last = evaluations[-1]
    trained = [record for record in records if record["step"] > 0]
    return {
        "before": evaluations[0]["eval/avg_at_k"],
        "after": last["eval/avg_at_k"],
        "low": last["eval/avg_at_k_low"],
        "high": last["eval/avg_at_k_high"],
        "seconds": sum(record["time/step"] for record in trained),
        "staleness": statistics.mean(record["staleness/mean"] for record in trained),
        "clipped": statistics.mean(record.get("policy/clip_fraction", 0) for record in trained),
        "ages": {age: of_age(trained, age) for age in AGES},
    }


def of_age(records, age):
    """Share of tokens, effective sample size and clip fraction: means over the tokens of the given age."""
    total = sum(record.get(f"{other}/tokens", 0) for record in records for other in AGES)
    seen = [record for record in records if f"{age}/effective_sample_size" in record]
    tokens = sum(record[f"{age}/tokens"] for record in seen)
    if tokens == 0:
        return None
    means = [
        sum(record[f"{age}/tokens"] * record.get(f"{age}/{name}", 0) for record in seen) / tokens
        for name in ("effective_sample_size", "clip_fraction")
    ]
    return tokens / total, *means


def main():
    args = parse_arguments()
    cases = [(eta, loss, seed) for seed in args.seeds for eta in args.eta for loss in args.losses]
    cases += [(eta, loss, seed) for seed in args.more_seeds for eta in (0, 4) for loss in args.losses]
    cases = [case for case in cases if case[0] > 0 or case[1] == args.losses[0]]
    if not args.table_only:
        for case in cases:
            if row_of(folder_of(args, *case), args.steps) is None:
                run(args, *case)
    rows = {}
    for case in sorted(set(cases)):
        row = row_of(folder_of(args, *case), args.steps)
        if row is not None:
            rows[case] = row
    print_runs(rows)
    print_curves(args, rows)
    print_ages(rows)


def name_of(eta):
    return "none" if eta >= UNBOUNDED else str(eta)


def print_runs(rows):
    print("eta   loss       seed  before  after  95%             seconds  staleness  clipped")
    for (eta, loss, seed), row in rows.items():
        print(
            f"{name_of(eta):<5} {loss:<10} {seed:<5} {row['before']:>6.1%} {row['after']:>6.1%}"
            f"  {row['low']:.1%} to {row['high']:.1%}  {row['seconds']:>7.0f}  {row['staleness']:>9.2f}"
            f"  {row['clipped']:>7.2%}"
        )


def print_curves(args, rows):
    print("\neta   loss       seed  accuracy (samples generated, seconds of training)")
    for (eta, loss, seed), _ in rows.items():
        samples = seconds = 0
        points = []
        for record in read_metrics(folder_of(args, eta, loss, seed)):
            samples += record.get("rollout/batch_groups", 0) * GROUP
            seconds += record["time/step"] if record["step"] > 0 else 0
            if "eval/avg_at_k" in record:
                points.append(f"{record['eval/avg_at_k']:.1%} ({samples:,.0f}, {seconds:.0f} s)")
        print(f"{name_of(eta):<5} {loss:<10} {seed:<5} {'  '.join(points)}")


def print_ages(rows):
    print("\neta   loss       seed  age         share of tokens  effective sample size  clipped")
    for (eta, loss, seed), row in rows.items():
        for age, values in row["ages"].items():
            if values is None:
                continue
            share, effective, clipped = values
            label = age.removeprefix("age_").replace("_to_", " to ").replace("_up", " or more")
            print(
                f"{name_of(eta):<5} {loss:<10} {seed:<5} {label:<10}  {share:>15.1%}"
                f"  {effective:>21.3f}  {clipped:>7.2%}"
            )


if __name__ == "__main__":
    main()

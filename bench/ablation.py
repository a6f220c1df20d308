#!/usr/bin/env python3
"""Measures reward against staleness: the demo's training with samples that are exactly k versions old.

Each run trains the demo's warm model for 250 steps with four mini-batches a step (with one, pi equals pi_old
and the losses do not differ). `rollout.fixed_staleness` gives every batch the age k. The losses:
  decoupled  pi_old is the trained policy at the start of the step; mu is corrected (AReaL, equation 5)
  naive      PPO's clip is around mu, the policy that sampled
With k 0 the two give the same bits, so only one is run. The learning rate is the one of --lrs with the
highest accuracy of the first seed at k 0 after the last step. All k and losses are run with it and with twice
of it.

Criteria, fixed before any run, at each learning rate. A score is the mean over the seeds of the held-out
accuracy after the last step.
  holds      the score is at most 3 percentage points below that of k 0
  degrades   it is lower
  collapses  it is below the warm model's accuracy

Each run leaves one small file in --results, which can be committed, so several sessions can add to one
experiment. The warm model depends on the machine's rounding. So results are in a folder per warm model, demo-
HASH, and a run is compared with k 0 of the same warm model and seed. A run whose file exists is skipped, an
interrupted run resumes. With --asynchronous generation and training run at once, k only bounds the age, and
ages depend on the machine's speed. The script prints these tables: the scores; accuracy and its 95% interval
of each run; accuracy at each evaluation against samples and seconds; share of tokens, effective sample size
and clip fraction by token age, over all steps.
"""

import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from command_line import add_bough, parser_of, run_part  # noqa: E402
from run_results import folder_of_results, read_metrics, write_record  # noqa: E402

GROUP = 16  # samples per prompt, as in configs/sums.yaml
MARGIN = 0.03
AGES = ["age_0", "age_1", "age_2", "age_3_to_4", "age_5_to_8", "age_9_up"]
LOSSES = {
    "decoupled": ["actor.use_decoupled_loss=true"],
    "naive": ["actor.use_decoupled_loss=false", "actor.recompute_logprob=false"],
}


def parse_arguments():
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_bough(parser)
    add("--demo", type=Path, default=ROOT / "runs/demo", help="the demo's folder: its warm model")
    add("--out", type=Path, default=ROOT / "runs/ablation", help="folder of the runs")
    add("--results", type=Path, help="folder of the results (default: bench/staleness_results)")
    add("--steps", type=int, default=250)
    add("--lrs", type=float, nargs="+", default=[1.25e-4, 2.5e-4, 5e-4], help="the demo has 5e-4")
    add("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16], metavar="K")
    add("--losses", nargs="+", choices=LOSSES, default=list(LOSSES))
    add("--seeds", type=int, nargs="+", default=[1], help="seeds of every k")
    add("--more-seeds", type=int, nargs="*", default=[2, 3], help="further seeds of --more-staleness")
    add("--more-staleness", type=int, nargs="*", default=[0, 4, 16], metavar="K")
    add("--asynchronous", action="store_true", help="k bounds the age; results in another folder")
    add("--table-only", action="store_true", help="only print the tables of existing results")
    args = parser.parse_args()
    name = "asynchronous_results" if args.asynchronous else "staleness_results"
    args.results = args.results or ROOT / "bench" / name
    args.warm = None if args.table_only else warm_name(args.demo)
    return args


def warm_name(demo):
    """The folder of the results of runs from this warm model."""
    model = demo / "warm/model.safetensors"
    if not model.exists():
        raise SystemExit(f"--demo {demo}: no {model}; `make demo` makes it")
    return folder_of_results("demo", demo / "warm")


def name_of(lr, k, loss, seed):
    return f"{loss}-k{k}-lr{lr:g}-seed{seed}"


def run(args, lr, k, loss, seed):
    demo = args.demo.resolve()
    experiment = "asynchronous" if args.asynchronous else "fixed"
    settings = {
        "fileroot": args.out.resolve(),
        "experiment_name": experiment,
        "trial_name": name_of(lr, k, loss, seed),
        "seed": seed,
        "model.path": demo / "warm",
        "train_dataset.path": demo / "train.jsonl",
        "train_dataset.few_shot.path": demo / "examples.jsonl",
        "valid_dataset.path": demo / "test.jsonl",
        "valid_dataset.few_shot.path": demo / "examples.jsonl",
        "total_train_steps": args.steps,
        "evaluator.freq_steps": 50,
        "compare_dense": 0,
        "saver.keep": 1,
        "saver.rollouts": "false",
        "actor.ppo_n_minibatches": 4,
        "actor.optimizer.lr": lr,
        "rollout.max_head_offpolicyness": k,
    }
    if k > 0 and not args.asynchronous:
        settings["rollout.fixed_staleness"] = "true"
    command = [str(args.bough), "train", str(ROOT / "configs/sums.yaml")]
    command += [f"{key}={value}" for key, value in settings.items()] + LOSSES[loss]
    run_part(command)
    result = {"lr": lr, "k": k, "loss": loss, "seed": seed, "steps": args.steps}
    result |= summary(args.out / experiment / settings["trial_name"])
    write_record(args.results / args.warm / f"{settings['trial_name']}.json", result)
    return result | {"warm": args.warm}


def summary(folder):
    records = read_metrics(folder)
    trained = [record for record in records if record["step"] > 0]
    curve, samples, seconds = [], 0, 0
    for record in records:
        samples += record.get("rollout/batch_groups", 0) * GROUP
        seconds += record["time/step"] if record["step"] > 0 else 0
        if "eval/avg_at_k" in record:
            interval = [record[f"eval/avg_at_k{end}"] for end in ("", "_low", "_high")]
            curve.append([record["step"], int(samples), round(seconds), *(round(x, 4) for x in interval)])
    return {
        "curve": curve,
        "staleness": statistics.mean(record["staleness/mean"] for record in trained),
        "clipped": statistics.mean(record.get("policy/clip_fraction", 0) for record in trained),
        "ages": {age: values for age in AGES if (values := of_age(trained, age))},
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
    return [round(value, 5) for value in (tokens / total, *means)]


class Results:
    def __init__(self, args):
        self.args = args
        self.rows = {}
        for path in args.results.glob("*/*.json"):
            row = json.loads(path.read_text()) | {"warm": path.parent.name}
            self.rows[case_of(row)] = row

    def get(self, lr, k, loss, seed):
        """The result of a run, or None if it is missing and --table-only is given."""
        known = [row for case, row in self.rows.items() if case[:4] == (lr, k, loss, seed)]
        if known or self.args.table_only:
            return known[0] if known else None
        if k > 0 and not self.zero(lr, seed, self.args.warm):
            self.run(lr, 0, self.args.losses[0], seed)
        return self.run(lr, k, loss, seed)

    def run(self, *case):
        row = run(self.args, *case)
        self.rows[case_of(row)] = row
        return row

    def zero(self, lr, seed, warm):
        """The run at k 0 that a run with this seed from this warm model is compared with."""
        cases = [case for case in self.rows if (case[0], case[1], *case[3:]) == (lr, 0, seed, warm)]
        return self.rows[cases[0]] if cases else None


def case_of(row):
    return row["lr"], row["k"], row["loss"], row["seed"], row["warm"]


def cases_of(args, lr):
    cases = [(lr, k, loss, seed) for seed in args.seeds for k in args.staleness for loss in args.losses]
    cases += [
        (lr, k, loss, seed) for seed in args.more_seeds for k in args.more_staleness for loss in args.losses
    ]
    return [case for case in cases if case[1] > 0 or case[2] == args.losses[0]]


def main():
    args = parse_arguments()
    results = Results(args)
    first = [results.get(lr, 0, args.losses[0], args.seeds[0]) for lr in args.lrs]
    if not all(first):
        raise SystemExit(f"no results of k 0 for all of --lrs in {args.results}")
    best = args.lrs[max(range(len(first)), key=lambda i: after(first[i]))]
    print(f"learning rate: {best:g}, of", ", ".join(f"{row['lr']:g} ({after(row):.1%})" for row in first))
    for lr in (best, 2 * best):
        for case in cases_of(args, lr):
            results.get(*case)
    for lr in (best, 2 * best):
        print_scores(results, lr)
    print_runs(results.rows)
    print_curves(results.rows)
    print_ages(results.rows)


def print_scores(results, lr):
    """The scores with their verdicts: a table of docs/asynchrony.md."""
    groups = {}
    for row in results.rows.values():
        if row["lr"] == lr:
            groups.setdefault((row["k"], row["loss"]), []).append(row)
    before = {row["warm"]: row["curve"][0][3] for rows in groups.values() for row in rows}
    text = ", ".join(f"{warm} {accuracy:.1%}" for warm, accuracy in sorted(before.items()))
    print(f"\nlearning rate {lr:g}; before training: {text}\n")
    print("| k | loss | seeds | after | lowest to highest | above k 0 | clipped tokens | verdict |")
    print("|---|---|---|---|---|---|---|---|")
    for (k, loss), rows in sorted(groups.items()):
        scores = [after(row) for row in rows]
        spread = f"{min(scores):.1%} to {max(scores):.1%}"
        clipped = statistics.mean(row["clipped"] for row in rows)
        name = "both (equal bits)" if k == 0 else loss
        pairs = [(row, results.zero(lr, row["seed"], row["warm"])) for row in rows]
        gains = [after(row) - after(zero) for row, zero in pairs if zero]
        difference = verdict = ""
        if k > 0 and gains:
            difference = f"{100 * statistics.mean(gains):+.1f} points"
            is_above_warm = statistics.mean(scores) >= statistics.mean(before[row["warm"]] for row in rows)
            verdict = "degrades" if is_above_warm else "collapses"
            verdict = "holds" if statistics.mean(gains) >= -MARGIN else verdict
        print(
            f"| {k} | {name} | {len(rows)} | {statistics.mean(scores):.1%} | {spread} | {difference} |"
            f" {clipped:.2%} | {verdict} |"
        )


def after(row):
    return row["curve"][-1][3]


def label(row):
    return f"{row['lr']:<9g} {row['k']:<3} {row['loss']:<10} {row['seed']:<5}"


def in_order(rows):
    return [rows[case] for case in sorted(rows)]


def print_runs(rows):
    print("\nlr        k   loss       seed  before  after  95%             seconds  staleness  clipped")
    for row in in_order(rows):
        _, _, seconds, accuracy, low, high = row["curve"][-1]
        print(
            f"{label(row)} {row['curve'][0][3]:>6.1%} {accuracy:>6.1%}  {low:.1%} to {high:.1%}"
            f"  {seconds:>7.0f}  {row['staleness']:>9.2f}  {row['clipped']:>7.2%}"
        )


def print_curves(rows):
    print("\nlr        k   loss       seed  accuracy (samples trained on, seconds of training)")
    for row in in_order(rows):
        points = [f"{point[3]:.1%} ({point[1]:,}, {point[2]} s)" for point in row["curve"]]
        print(f"{label(row)} {'  '.join(points)}")


def print_ages(rows):
    print("\nlr        k   loss       seed  age         share of tokens  effective sample size  clipped")
    for row in in_order(rows):
        for age, (share, effective, clipped) in row["ages"].items():
            name = age.removeprefix("age_").replace("_to_", " to ").replace("_up", " or more")
            print(f"{label(row)} {name:<10}  {share:>15.1%}  {effective:>21.3f}  {clipped:>7.2%}")


if __name__ == "__main__":
    main()

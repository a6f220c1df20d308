#!/usr/bin/env python3
"""Compares sparse with dense rollouts on the task `trace`: modes of sparse_training.mode, budgets, seeds.

The script first makes the data and the dense warm start of a model of at most 5 M parameters. The warm start
trains on short programs, whose steps have any label, then on longer and on whole programs. Then each mode
trains from the same warm model, and its last checkpoint is evaluated with dense and with sparse attention.
All results are in folders under --out. Finished runs are skipped, interrupted runs resume, and --hours stops
between two runs. Budgets are fractions of the mean response length. All modes use the first budget; only
`sparse` and `distill` use the others.

The verdicts were fixed before any run (score: final, dense attention, temperature 1, mean over the seeds):
  equal to dense   the mode's score differs from dense's by at most the margin: the larger of 0.03 and half of
                   the spread (largest minus smallest) of dense's seeds
  worse, better    the score is below or above dense's by more than the margin
  collapsed        the score is below the warm model's by more than 0.03, or the mean response of the last
                   tenth of the steps is shorter than half of dense's
A mode with fewer than three seeds also gets a verdict, and the table gives the number of seeds.

Writes table.md (verdicts and their figures) and curves.svg into --out. The curves show reward, length and
acceptance by step: the mean over the seeds, and the band from the smallest to the largest value.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from host_env import host_environment  # noqa: E402
from run_results import mean_and_range as cell  # noqa: E402
from run_results import read_metrics, write_aside  # noqa: E402

PAGE = 16
LEAST_PAGES = 4  # the first page, the last two, and one selected page
MARGIN = 0.03
MOST_PARAMETERS = 5_000_000
ARMS = ["dense", "sparse", "sparse_to_sparse", "distill"]
MORE_ARMS = ["exact_top_k"]  # modes of sparse_training.mode that run only on request
MORE_BUDGETS = ("sparse", "distill")  # modes that run with all budgets, not only with the first
COLOURS = ["#3b6fb6", "#c8553d", "#7a9a3a", "#8a5fb0", "#c79a2b", "#3c9a94", "#333333", "#d07fb4"]
CURVES = [
    ("reward/mean", "Reward of the samples"),
    ("rollout/length_mean", "Response length, tokens"),
    ("sparse/overlap", "Acceptance: sum of min(p, q)"),
]


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="\n".join(__doc__.splitlines()[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--bough", type=Path, default=os.environ.get("BOUGH") or ROOT / "build/bin/bough")
    add("--out", type=Path, default=ROOT / "runs/sparse_ablation")
    add("--arms", nargs="+", choices=ARMS + MORE_ARMS, default=ARMS)
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--budgets", type=float, nargs="+", default=[0.07, 0.10], help="shares of the mean response")
    add("--steps", type=int, default=60)
    add("--prompts", type=int, default=4, help="prompts per step")
    add("--samples", type=int, default=8, help="samples per prompt")
    add("--lr", type=float, default=5e-5)
    add(
        "--correction",
        default="obrs",
        help="actor.correction of the modes whose behavior policy is not the policy; the paper uses obrs",
    )
    add("--kl", type=float, default=0.001, help="sparse_training.kl_loss_coef of distill")
    add("--dense-layers", type=int, default=2, help="rollout.sparse.dense_layers")
    add("--hours", type=float, default=8, help="no run starts after so many hours; 0: no limit")
    add("--registers", type=int, default=5, help="registers per program of the task")
    add("--program-steps", type=int, nargs=2, default=[46, 60], metavar=("LEAST", "MOST"))
    add("--hidden-size", type=int, default=192)
    add("--layers", type=int, default=4)
    add("--train-programs", type=int, default=4000)
    add("--test-programs", type=int, default=64)
    add("--test-samples", type=int, default=2)
    add(
        "--lessons",
        nargs="*",
        default=["1:5:32:600", "4:16:16:400", "8:60:8:1000"],
        metavar="LEAST:MOST:BATCH:STEPS",
        help="warm-up before whole programs: programs of LEAST to MOST steps, BATCH per step, STEPS steps",
    )
    add("--lesson-programs", type=int, default=20000)
    add("--warm-programs", type=int, default=4000)
    add("--warm-steps", type=int, default=150)
    add("--warm-batch", type=int, default=8)
    add("--warm-lr", type=float, default=1e-3)
    add("--warm-dtype", default="bf16", help="dtype of the warm start")
    add(
        "--warm-slips",
        type=float,
        default=0.013,
        help="share of wrong steps in whole demonstrations, so that there is something left to learn",
    )
    add("--settings", nargs="*", default=[], help="further key=value settings of every run")
    add("--warm-only", action="store_true")
    add("--table-only", action="store_true", help="only write the table of existing runs")
    return parser.parse_args(arguments)


# ---- Runs.


class Experiment:
    def __init__(self, args):
        self.args = args
        self.out = args.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + 3600 * args.hours if args.hours > 0 else float("inf")

    def bough(self, *command, log=None):
        """The stdout of a command that must succeed. Its stderr goes to the file `log`."""
        environment = {**os.environ, **host_environment(), "OMP_WAIT_POLICY": "passive"}
        words = [str(self.args.bough), *map(str, command)]
        path = self.out / (log or "data.log")
        with path.open("a") as errors:
            done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        if done.returncode != 0:
            raise SystemExit(f"stopped at {' '.join(words)}; see {path}; the same command continues")
        return done.stdout

    def prepare(self):
        """Makes the data and the warm model. Their settings are stored beside them and must not change."""
        args = self.args
        kept = {name: getattr(args, name) for name in WARM_SETTINGS}
        path = self.out / "warm_settings.json"
        if path.exists() and json.loads(path.read_text()) != kept:
            raise SystemExit(
                f"{path} has other settings of data or warm start; use the same, or another --out"
            )
        if not path.exists():
            write_aside(path, json.dumps(kept, indent=1))
        least, most = args.program_steps
        self.make_data("train", args.train_programs, [least, most], split="train")
        self.make_data("test", args.test_programs, [least, most], split="test")
        if not (self.out / "base/model.safetensors").exists():
            shape = ["--layers", args.layers, "--hidden-size", args.hidden_size, "--head-dim", 32]
            shape += ["--heads", 6, "--kv-heads", 3, "--tie"]
            self.bough("init", self.out / "base", "--force", *shape)
        parameters = count_parameters(self.out / "base/model.safetensors")
        if parameters > MOST_PARAMETERS:
            raise SystemExit(f"the model has {parameters:,} parameters, more than {MOST_PARAMETERS:,}")
        model = "base"
        for number, lesson in enumerate(args.lessons, start=1):
            fewest, longest, batch, steps = map(int, lesson.split(":"))
            name = f"lesson{number}"
            labels = ["--max-first", max(1, most - longest + 1)]
            self.make_data(name, args.lesson_programs, [fewest, longest], *labels, seed=10 + number)
            self.fine_tune(model, name, batch, steps)
            model = name
        slips = ["--slips", args.warm_slips]
        self.make_data("warm", args.warm_programs, [least, most], *slips, seed=7)
        self.fine_tune(model, "warm", args.warm_batch, args.warm_steps)

    def make_data(self, name, count, program_steps, *options, split="train", seed=1):
        if not self.data(name).exists():
            task = ["--registers", self.args.registers, "--seed", seed, "--split", split, "-n", count]
            task += ["--min-steps", program_steps[0], "--max-steps", program_steps[1]]
            self.bough("data", "trace", "--out", self.data(name), *task, *options)

    def fine_tune(self, model, name, batch, steps):
        """Trains the model `name` from `model` on the data called `name`."""
        if not (self.out / name / "model.safetensors").exists():
            where = ["--model", self.out / model, "--data", self.data(name), "--out", self.out / name]
            effort = ["--batch-size", batch, "--lr", self.args.warm_lr, "--max-steps", steps]
            effort += ["--epochs", 1000, "--dtype", self.args.warm_dtype]
            self.bough("sft", *where, *effort, log=f"{name}.log")

    def data(self, name):
        return self.out / f"{name}.jsonl"

    def lengths(self):
        """Mean and largest number of bytes of the worked answers. One byte is one token."""
        lines = self.data("train").read_text().splitlines()
        sizes = [len(json.loads(line)["answer"]) + 1 for line in lines]
        return statistics.mean(sizes), max(sizes)

    def pages(self, budget):
        return max(LEAST_PAGES, round(budget * self.lengths()[0] / PAGE))

    def cases(self):
        """Tuples (mode, budget, seed), by seed, so that a partial run is balanced. dense has budget None."""
        cases = []
        for seed in self.args.seeds:
            for mode in self.args.arms:
                budgets = self.args.budgets if mode in MORE_BUDGETS else self.args.budgets[:1]
                cases += [(mode, None if mode == "dense" else budget, seed) for budget in budgets]
        return cases

    def folder(self, case):
        mode, budget, seed = case
        name = mode if budget is None else f"{mode}-{budget:g}"
        return self.out / "trace" / f"{name}-seed{seed}"

    def sparse_settings(self, budget):
        return [
            f"rollout.sparse.budget={PAGE}x{self.pages(budget)}",
            f"rollout.sparse.dense_layers={self.args.dense_layers}",
        ]

    def settings(self, case):
        mode, budget, seed = case
        args = self.args
        settings = {
            "fileroot": self.out,
            "experiment_name": "trace",
            "trial_name": self.folder(case).name,
            "seed": seed,
            "model.path": self.out / "warm",
            "train_dataset.path": self.data("train"),
            "train_dataset.batch_size": args.prompts,
            "gconfig.n_samples": args.samples,
            "gconfig.max_new_tokens": self.lengths()[1] + 16,
            "total_train_steps": args.steps,
            "actor.optimizer.lr": args.lr,
            "actor.optimizer.weight_decay": 0,
            "saver.freq_steps": 10,
            "saver.keep": 1,
        }
        if mode not in ("dense", "sparse_to_sparse"):  # the behavior policy is not the trained policy
            settings["actor.correction"] = args.correction
            settings["gconfig.top_logprobs"] = 20
        if mode != "dense":
            settings["sparse_training.mode"] = mode
        if mode == "exact_top_k":
            settings["rollout.sparse.summary"] = "exact"
        if mode == "distill":
            settings["sparse_training.kl_loss_coef"] = args.kl
        lines = [f"{key}={value}" for key, value in settings.items()]
        return lines + ([] if budget is None else self.sparse_settings(budget)) + list(args.settings)

    def train(self, case):
        metrics = read_metrics(self.folder(case))
        if not metrics or metrics[-1]["step"] < self.args.steps:
            self.bough("train", ROOT / "configs/trace.yaml", *self.settings(case), log="train.log")

    def evaluate(self, name, model, budget):
        """The score with dense attention (budget None) or with the budget. scores.json caches it."""
        path = self.out / "scores.json"
        scores = read_scores(self.out)
        key = f"{name}/{'dense' if budget is None else f'{budget:g}'}"
        if key not in scores:
            words = ["--model", model, "--data", self.data("test"), "--k", self.args.test_samples, "--json"]
            words += ["--temperature", 1, "--max-new-tokens", self.lengths()[1] + 16]
            words += [] if budget is None else self.sparse_settings(budget)
            line = self.bough("eval", *words, log="eval.log")
            result = json.loads(line.splitlines()[-1])
            scores = read_scores(self.out)  # another process may evaluate other modes at the same time
            scores[key] = {"score": result["avg_at_k"], "length": result["length_mean"]}
            write_aside(path, json.dumps(scores, indent=1))
        return scores[key]

    def evaluate_case(self, case):
        mode, budget, _ = case
        folder = self.folder(case)
        step = folder / "checkpoints" / (folder / "latest").read_text().strip()
        model = step / "model"
        self.evaluate(folder.name, model, None)
        for share in self.args.budgets if mode == "dense" else [budget]:
            self.evaluate(folder.name, model, share)
        if mode == "distill":  # this mode's sparse policy has adapters
            merged = folder / "sparse_policy"
            key = f"{folder.name} phi"
            if f"{key}/{budget:g}" not in read_scores(self.out):
                shutil.rmtree(merged, ignore_errors=True)
                self.bough("merge", model, step / "sparse_adapter", merged, log="eval.log")
                self.evaluate(key, merged, budget)
                shutil.rmtree(merged)

    def run(self):
        self.prepare()
        for budget in [None, *self.args.budgets]:
            self.evaluate("warm", self.out / "warm", budget)
        if self.args.warm_only:
            return
        for case in self.cases():
            if time.monotonic() > self.deadline:
                print(f"{self.args.hours:g} hours ended before {self.folder(case).name}")
                return
            self.train(case)
            self.evaluate_case(case)


WARM_SETTINGS = [
    "registers", "program_steps", "hidden_size", "layers", "train_programs", "test_programs", "test_samples",
    "lessons", "lesson_programs", "warm_programs", "warm_steps", "warm_batch", "warm_lr", "warm_slips",
    "warm_dtype",
]  # fmt: skip


def count_parameters(path):
    """The number of parameters, from the header of a safetensors file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            size = 1
            for extent in tensor["shape"]:
                size *= extent
            total += size
    return total


def read_scores(out):
    path = out / "scores.json"
    return json.loads(path.read_text()) if path.exists() else {}


# ---- Results.


def judge(score, length, dense_scores, dense_length, warm_score):
    """The verdict (see the head of this file) on a mode's mean score and final length."""
    dense = statistics.mean(dense_scores)
    margin = max(MARGIN, (max(dense_scores) - min(dense_scores)) / 2)
    if score < warm_score - MARGIN or length < dense_length / 2:
        return "collapsed"
    if score < dense - margin:
        return "worse"
    return "better" if score > dense + margin else "equal"


def of_last_tenth(records, name):
    records = [record for record in records if record["step"] > 0]
    values = [record[name] for record in records[-max(1, len(records) // 10) :] if name in record]
    return statistics.mean(values) if values else None


def summaries(experiment):
    """Per (mode, budget): the table's figures, means over the seeds with finished runs."""
    scores = read_scores(experiment.out)
    rows = {}
    for case in experiment.cases():
        folder = experiment.folder(case)
        records = read_metrics(folder)
        if f"{folder.name}/dense" not in scores or records[-1]["step"] < experiment.args.steps:
            continue
        mode, budget, _ = case
        row = rows.setdefault((mode, budget), {name: [] for name in ROW_NAMES})
        row["dense"].append(scores[f"{folder.name}/dense"]["score"])
        for share in experiment.args.budgets if mode == "dense" else [budget]:
            row["sparse"].append(scores[f"{folder.name}/{share:g}"]["score"])
        if mode == "distill":
            row["phi"].append(scores[f"{folder.name} phi/{budget:g}"]["score"])
        row["length"].append(of_last_tenth(records, "rollout/length_mean"))
        row["reward"].append(of_last_tenth(records, "reward/mean"))
        row["seconds"].append(statistics.median(r["time/step"] for r in records if r["step"] > 0))
        row["rollout"].append(statistics.median(r["time/rollout"] for r in records if r["step"] > 0))
        for name in ("overlap", "overlap_p5", "acceptance"):
            value = of_last_tenth(records, f"sparse/{name}")
            if value is not None:
                row[name].append(value)
    return rows


ROW_NAMES = [
    "dense",
    "sparse",
    "phi",
    "length",
    "reward",
    "seconds",
    "rollout",
    "overlap",
    "overlap_p5",
    "acceptance",
]


def table(experiment, rows):
    scores = read_scores(experiment.out)
    warm = scores["warm/dense"]["score"]
    dense = rows.get(("dense", None))

    lines = [
        "| mode | budget | seeds | score, dense attention | with the budget | its own sparse policy | "
        "length | acceptance | 5th percentile | s a step (rollout) | against dense |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        f"| warm model | | | {warm:.3f} | "
        + ", ".join(f"{scores[f'warm/{b:g}']['score']:.3f} at {b:.0%}" for b in experiment.args.budgets)
        + f" | | {scores['warm/dense']['length']:.0f} | | | | |",
    ]
    for (mode, budget), row in rows.items():
        verdict = ""
        if dense and mode != "dense":
            verdict = judge(
                statistics.mean(row["dense"]),
                statistics.mean(row["length"]),
                dense["dense"],
                statistics.mean(dense["length"]),
                warm,
            )
        share = "" if budget is None else f"{budget:.0%} ({experiment.pages(budget)} pages)"
        lines.append(
            f"| {mode} | {share} | {len(row['dense'])} | {cell(row['dense'])} | {cell(row['sparse'])} | "
            f"{cell(row['phi'])} | {cell(row['length'], 0)} | {cell(row['overlap'] or row['acceptance'])} | "
            f"{cell(row['overlap_p5'])} | {cell(row['seconds'], 1)} ({cell(row['rollout'], 1)}) | {verdict} |"
        )
    return "\n".join(lines) + "\n"


def curves_of(experiment, metric):
    """Per (mode, budget): [(step, mean, smallest, largest)] over the seeds that have the step."""
    by_mode = {}
    for case in experiment.cases():
        for record in read_metrics(experiment.folder(case)):
            if record["step"] > 0 and metric in record:
                by_step = by_mode.setdefault(case[:2], {})
                by_step.setdefault(record["step"], []).append(record[metric])
    return {
        mode: [(step, statistics.mean(v), min(v), max(v)) for step, v in sorted(steps.items())]
        for mode, steps in by_mode.items()
    }


def svg(experiment):
    width, height, left, top, bottom = 900, 260, 70, 34, 30
    parts = []
    names = {}
    panels = [(title, curves_of(experiment, metric)) for metric, title in CURVES]
    panels = [(title, curves) for title, curves in panels if curves]
    for _, curves in panels:
        for mode in curves:
            names.setdefault(mode, COLOURS[len(names) % len(COLOURS)])
    for number, (title, curves) in enumerate(panels):
        points = [point for curve in curves.values() for point in curve]
        low, high = min(p[2] for p in points), max(p[3] for p in points)
        high = high if high > low else low + 1
        last = max(p[0] for p in points)
        y0 = number * height

        def x(step, last=last):
            return left + (width - left - 20) * (step - 1) / max(1, last - 1)

        def y(value, low=low, high=high, y0=y0):
            return y0 + height - bottom - (height - top - bottom) * (value - low) / (high - low)

        parts.append(f'<text x="{left}" y="{y0 + 20}" font-weight="bold">{title}</text>')
        for value in (low, (low + high) / 2, high):
            parts.append(f'<path d="M{left} {y(value):.1f}H{width - 20}" stroke="#ccc"/>')
            parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        for step in sorted({1, last // 2 or 1, last}):
            anchor = "end" if step == last else "middle"
            parts.append(
                f'<text x="{x(step):.1f}" y="{y0 + height - 10}" text-anchor="{anchor}">step {step}</text>'
            )
        for mode, curve in curves.items():
            band = [(x(p[0]), y(p[3])) for p in curve] + [(x(p[0]), y(p[2])) for p in reversed(curve)]
            shape = " ".join(f"{a:.1f},{b:.1f}" for a, b in band)
            line = " ".join(f"{x(p[0]):.1f},{y(p[1]):.1f}" for p in curve)
            parts.append(f'<polygon points="{shape}" fill="{names[mode]}" opacity="0.12"/>')
            parts.append(f'<polyline points="{line}" fill="none" stroke="{names[mode]}" stroke-width="1.6"/>')
    end, at = len(panels) * height, left
    for (mode, budget), colour in names.items():
        label = mode if budget is None else f"{mode}, {budget:.0%}"
        if at + 20 + 7 * len(label) > width:
            end, at = end + 20, left
        parts.append(f'<rect x="{at}" y="{end}" width="14" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{at + 20}" y="{end + 10}">{label}</text>')
        at += 45 + 7 * len(label)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {end + 24}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{end + 24}" fill="white"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def main():
    args = parse_arguments()
    experiment = Experiment(args)
    if not args.table_only:
        experiment.run()
    if args.warm_only:
        print(json.dumps(read_scores(args.out), indent=1))
        return
    text = table(experiment, summaries(experiment))
    write_aside(args.out / "table.md", text)
    write_aside(args.out / "curves.svg", svg(experiment))
    print(text)


if __name__ == "__main__":
    main()

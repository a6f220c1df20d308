#!/usr/bin/env python3
"""GRPO on tau2-bench's telecom: what does a small model learn beyond its warm start and beyond the ticket?

The agent works alone (tau2's solo mode). The script makes the data, a tokenizer of byte pairs, and a model
with random weights. `bough sft` trains the model on conversations of the scripted expert, which makes
mistakes. Then `bough train` trains with GRPO on the 74 tasks of tau2's train split, asynchronously (eta 2, 8
conversations a task), with three seeds, through examples/tau2/tau2_server.py. The model is scored before and
after on the test split (40 tasks x 8 conversations) and on 400 other tasks (x 2) that were drawn by hash
beforehand. 5 steps with dense passes and 5 with trees, both synchronous from the warm model, compare time
and memory.

Finished parts are skipped and an interrupted run resumes from its checkpoint. Each part leaves one small file
under --results, which can be committed, so several sessions can add to one experiment. --hours limits the
machine time of all files together. After the first step of a run the script prints the forecast.

  WARM/warm.json      the warm model: settings, seconds, scores. WARM has the hash of its weights, since a
                      warm model depends on the machine's rounding
  WARM/seedN.json     a run of GRPO from this warm model: curves, seconds, scores
  WARM/passes.json    dense passes against trees: seconds, memory
  scripts.json        the best script that reads only the ticket, the expert, and the expert with mistakes

The best script is a list of calls for each kind of ticket (examples/tau2/tau2_ticket.py), chosen on the train
split. It may pass many tasks without looking at anything. So its success stands beside every score, and what
counts is success above it, and the number of calls: the script calls everything, an agent that checks calls
what is needed.

Time on one core of an Intel CPU with AMX, with --threads 1: data 7 minutes, a step of the warm-up 0.44 s, a
step of GRPO 9 to 11 s, the scores of a model 2 minutes. On one core of an AMD EPYC with AVX2 (Zen 3), with
--dtype fp32 --threads 1: data 14 minutes, scripts 8, 3.4 s, 32 s, 5 minutes.

Criteria, fixed before any run. A task's score is its share of successes over conversations, and over seeds if
there are several. Differences are paired over tasks: 95% interval of a bootstrap over tasks (10,000 draws).
  improved, worse     after - before: the interval is above 0, or below 0
  above, below        score - success of the best script: the same
  undecided           the interval has 0 inside
  The warm-up ends with the first part whose success on the train split is at least --warm-enough.
  The warm model is valid if its success on the test split is 0.2 to 0.5. Otherwise the script stops before
  any run of GRPO.

Differences from AReaL-DTA's experiment on tau2-bench (arXiv 2602.00482), written before any run:
  model        5 M parameters, random weights and 16K positions; the paper: pretrained models of billions. The
               plan was 7 M (6 layers, 30 tasks a step), cut before the warm-up for a CPU without AVX-512
  domains      telecom, where tickets replace the user; the paper: with a user
  prompts      byte pairs that reach over words, trained on telecom's text: a prompt has 1.0K tokens, with
               SmolLM2's tokenizer 9 to 10K
  rows         one for a conversation, since the template renders earlier turns unchanged
  warm-up      supervised, on the expert's conversations with --slips mistakes a turn, on the train split and
               on tasks that are in neither test set. With 0.1 the expert succeeds in 0.59 of the test split's
               conversations, with 0.16 in 0.48. The model also learns the answers of tools, since a whole
               conversation is one example
  machine      one, whose cores are divided between generation and training
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "bench"))
import tau2_report  # noqa: E402
from command_line import add_bough, parser_of  # noqa: E402
from run_results import folder_of_results, once_begun, read_metrics, write_aside, write_record  # noqa: E402
from tau2_warm import WarmExperiment  # noqa: E402
from trace_task import count_parameters, source  # noqa: E402

SCRIPTS = {
    "ticket": ["--agent", "ticket", "--lists", "lists.json"],
    "expert": ["--agent", "expert"],
    "expert with mistakes": ["--agent", "expert", "--samples", 8],
}


def parse_arguments(arguments=None):
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_bough(parser)
    add("--python", type=Path, default=ROOT / ".venv-tau2/bin/python", help="with tau2 installed")
    add("--out", type=Path, default=ROOT / "runs/tau2_training", help="folder of data, models and runs")
    add("--results", type=Path, default=ROOT / "bench/tau2_results", help="folder of the results")
    add("--hours", type=float, default=5, help="machine time of all results; 0: no limit")
    add("--seeds", type=int, nargs="*", default=[1, 2, 3])
    add("--steps", type=int, default=100)
    add("--tasks", type=int, default=15, help="tasks of a step")
    add("--lr", type=float, default=2e-4)
    add("--pass-steps", type=int, default=5, help="steps with dense passes, and with trees; 0: none")
    add("--settings", nargs="*", default=[], help="further settings of every run")
    add("--threads", type=int, default=2)
    add("--dtype", default="bf16", help="of warm-up, runs and scores; fp32 is as fast without AVX-512")
    add("--slips", type=float, default=0.1, help="share of turns with a mistake in demonstrations")
    add("--demonstrations", type=int, default=16, help="conversations of each task of the train split")
    add("--further-tasks", type=int, default=1771, help="further tasks with demonstrations: all")
    add("--further-demonstrations", type=int, default=3, help="conversations of each further task")
    add("--vocab-size", type=int, default=8192)
    add("--layers", type=int, default=4)
    add("--hidden-size", type=int, default=256)
    add(
        "--warm-parts",
        nargs="+",
        default=["1e-3:1000"] + ["5e-4:300"] * 6,
        metavar="LR:STEPS",
        help="the warm-up in parts, each with its own falling learning rate",
    )
    add(
        "--warm-enough",
        type=float,
        default=0.3,
        metavar="SUCCESS",
        help="the warm-up ends after the first part with this success on the train split",
    )
    add("--warm-batch", type=int, default=16, help="conversations of a step of the warm-up")
    add(
        "--valid",
        type=float,
        nargs=2,
        default=[0.2, 0.5],
        metavar=("LEAST", "MOST"),
        help="success of a valid warm model on the test split",
    )
    add("--train-tasks", type=int, default=74, help="of the train split")
    add("--test-tasks", type=int, default=40)
    add("--test-samples", type=int, default=8)
    add("--held-out", type=int, default=400, help="further tasks that are scored")
    add("--held-out-samples", type=int, default=2)
    add("--table-only", action="store_true", help="only write the tables of existing results")
    args = parser.parse_args(arguments)
    args.out, args.results = args.out.resolve(), args.results.resolve()
    return args


class Experiment(WarmExperiment):
    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        self.sets = {"test": args.test_samples, "held_out": args.held_out_samples}

    # ---- Scores.

    def score_model(self, model):
        """Scores of sampled conversations with the test set and the held-out tasks."""
        return {name: self.sample(model, name, samples) for name, samples in self.sets.items()}

    def score_scripts(self):
        """Chooses and scores the best script that reads only the ticket. The expert stands beside it."""
        path = self.args.results / "scripts.json"
        if path.exists():
            return
        begin = time.monotonic()
        words = ["choose", "--problems", "train.jsonl", "--out"]
        self.make_once("lists.json", lambda out: self.tau2("tau2_play.py", *words, out))
        record = {"lists": json.loads((self.out / "lists.json").read_text()), "scores": {}}
        for agent, options in SCRIPTS.items():
            if agent == "expert with mistakes":
                options = [*options, "--slips", self.args.slips]
            counts, names = self.out / "counts.jsonl", ["train", *self.sets]
            files = [f"{name}.jsonl" for name in names]
            self.tau2("tau2_play.py", "success", "--problems", *files, *options, "--counts", counts)
            lines = counts.read_text().splitlines()
            record["scores"][agent] = dict(zip(names, map(json.loads, lines), strict=True))
        seconds = {"scripts": round(time.monotonic() - begin, 1)}
        write_record(path, record | {"seconds": seconds, **source()})

    def score_warm(self):
        path = self.results / "warm.json"
        if path.exists():
            return
        begin = time.monotonic()
        scores = self.score_model("warm")
        seconds = self.warm_seconds() | {"evaluation": round(time.monotonic() - begin, 1)}
        record = {"settings": self.settings(), "seconds": seconds, "scores": scores, **source()}
        record["parts"] = self.part_scores()
        record["parameters"] = count_parameters(self.out / "warm/model.safetensors")
        write_record(path, record)

    # ---- Runs.

    def run(self):
        self.prepare()
        self.results = self.args.results / folder_of_results("warm", self.out / "warm")
        self.score_scripts()
        self.score_warm()
        warm = json.loads((self.results / "warm.json").read_text())
        success = tau2_report.mean_success(warm["scores"]["test"])
        print(f"the warm model's success on the test split: {success:.3f}", flush=True)
        least, most = self.args.valid
        if not least <= success <= most:
            raise SystemExit(
                f"the warm model's success is {success:.3f}, expected {least:g} to {most:g}; change "
                "--warm-enough, --warm-parts or --slips, with another --out and --results"
            )
        if self.args.pass_steps > 0 and self.is_affordable("passes", 0):
            self.compare_passes()
        for seed in self.args.seeds:
            if self.is_affordable(f"seed{seed}", self.seconds_of_seed()):
                self.train_and_score(seed)

    def is_affordable(self, name, needed):
        if (self.results / f"{name}.json").exists():
            return False
        used = tau2_report.used_seconds(self.args.results)
        left = 3600 * self.args.hours - used
        if self.args.hours > 0 and needed > left:
            print(f"not enough time for {name}: {needed / 60:.0f} of {max(0, left) / 60:.0f} minutes")
            return False
        return True

    def seconds_of_seed(self):
        """Expected seconds of a run: the mean of the others; 0 if there is none."""
        others = [tau2_report.seconds_of(json.loads(p.read_text())) for p in self.results.glob("seed*.json")]
        return sum(others) / len(others) if others else 0

    def run_settings(self, seed, url):
        args = self.args
        return {
            "fileroot": self.out,
            "experiment_name": "runs",
            "seed": seed,
            "threads": args.threads,
            "dtype": args.dtype,
            "model.path": self.out / "warm",
            "train_dataset.path": self.out / "train.jsonl",
            "train_dataset.batch_size": args.tasks,
            "environment.url": url,
            "actor.optimizer.lr": args.lr,
        }

    def train(self, name, seed, steps, watch=None, **changes):
        """Trains to the given step, unless the run has got there. Returns its folder."""
        folder = self.out / "runs" / name
        records = read_metrics(folder)
        if not records or records[-1]["step"] < steps:
            with self.server() as url:
                settings = self.run_settings(seed, url) | {"trial_name": name, "total_train_steps": steps}
                words = [f"{key}={value}" for key, value in (settings | changes).items()]
                config = ROOT / "configs/tau2_telecom.yaml"
                self.bough("train", config, *words, *self.args.settings, log="train.log", watch=watch)
        return folder

    def train_and_score(self, seed):
        args = self.args
        name = f"{self.results.name}-seed{seed}"
        print(f"seed {seed}", flush=True)
        watch = once_begun(self.out / "runs" / name, self.print_forecast)
        folder = self.train(name, seed, args.steps, watch)
        begin = time.monotonic()
        scores = self.score_model(folder / "checkpoints" / (folder / "latest").read_text().strip() / "model")
        records = [record for record in read_metrics(folder) if record["step"] > 0]
        given = {key: getattr(args, key) for key in ("steps", "tasks", "lr", "settings", "threads")}
        seconds = {"train": sum(record["time/step"] for record in records)}
        seconds["evaluation"] = time.monotonic() - begin
        record = {"seed": seed, "given": given, **source()}
        record["seconds"] = {key: round(value, 1) for key, value in seconds.items()}
        record |= tau2_report.summary(records) | {"scores": scores}
        write_record(self.results / f"seed{seed}.json", record)

    def print_forecast(self, record):
        args = self.args
        warm = json.loads((self.results / "warm.json").read_text())
        one = record["time/step"] * args.steps + warm["seconds"]["evaluation"]
        missing = [seed for seed in args.seeds if not (self.results / f"seed{seed}.json").exists()]
        used = tau2_report.used_seconds(args.results) / 3600
        print(
            f"forecast after step {record['step']}: {one / 60:.0f} minutes a run with its scores; "
            f"{len(missing)} missing runs take {one * len(missing) / 3600:.1f} hours, {used:.1f} of "
            f"{args.hours:g} are used",
            flush=True,
        )

    def compare_passes(self):
        """Synchronous steps from the warm model: their first batches are the same."""
        record = {"seconds": {}, **source()}
        for mode in ("dense", "auto"):
            name = f"{self.results.name}-{mode}"
            print(f"{mode} passes", flush=True)
            changes = {"rollout.max_head_offpolicyness": 0, "actor.tree_training_mode": mode}
            folder = self.train(name, 1, self.args.pass_steps, **changes)
            records = [record for record in read_metrics(folder) if record["step"] > 0]
            record["seconds"][mode] = round(sum(found["time/step"] for found in records), 1)
            record[mode] = tau2_report.pass_summary(records)
        write_record(self.results / "passes.json", record)


def main():
    args = parse_arguments()
    experiment = Experiment(args)
    if not args.table_only:
        experiment.run()
    text = tau2_report.tables(args.results)
    write_aside(args.out / "table.md", text)
    print(text, end="")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""DistillSparse on the task `trace`: do rollouts of a distilled sparse policy train as well as dense ones?

The script makes the data and a dense warm start of 1.8 M parameters. Then each arm trains from this model,
and its last weights are scored on 256 held-out programs x 4 samples, densely and sparsely. Finished runs
are skipped and interrupted runs resume. Each run leaves one small file under --results, which can be
committed, so several sessions can add to one experiment. `--hours` limits the machine time of all files
together. With --share 2 two commands fill the two cores of a machine with a run each. After the first step
of a run the script prints how long this run and all missing runs will take. bench/sparse_report.py makes the
tables.

Pairs. A warm model depends on the machine's rounding. So each run is stored under the hash of its warm
model, with the score of this model. An arm is compared only with dense runs of the same warm model and the
same seed, hence the same prompts in the same order. If a new machine makes another warm model, the script
repeats the runs that a missing run is compared with: dense and the arms of its claims, unless --arms leaves
them out. All 5 seeds of `dense`, `sparse` and `distill` have priority. A run of another arm starts only if
the time that is left suffices for it and for them.

Criteria, fixed before any run. The score of a run is the share of right final numbers at temperature 1,
with dense attention. Its gain is its score minus the score of its warm model.
  equal       the lower end of the 95% interval of (gain - 0.7 gain of dense) over the paired seeds is at
              least 0
  worse       the upper end is below 0
  undecided   otherwise
  higher, lower, undecided   two arms or policies: the interval of the paired difference is above 0, below
                             0, or has 0 inside
  collapsed   seeds whose score is below half of the warm model's, as a number
Intervals are Student's t over the pairs. The programs are the same in a pair, so their difficulty cancels,
and the unit that varies is the seed. A bootstrap over 3 to 5 seeds would give intervals that are too
narrow. Oversampling is judged by the acceptance and by the groups with a signal, both means over all steps,
at equal numbers of trained samples; seconds of a step stand beside them. Share of right steps: `until
error` counts a response's lines before the first line that differs from the worked answer, `lines` counts
all equal lines at their place, each divided by the number of lines of the worked answer.

Differences from the paper, written before any run:
  model and task   1.8 M parameters, 4 layers, 6 query and 3 key/value heads, programs of 46 to 60 steps
                   with responses of 1.2K tokens; the paper: 4B and 8B, mathematics, responses of 5K to
                   above 8K
  blocks           4 tokens; the paper: 16. The budget of 144 tokens is 12% of the mean response, or 100
                   tokens; the paper: 7% and 10%
  always kept      16 first and 32 last tokens, first 2 layers dense. The paper names none of these. The arm
                   distill_own_block keeps only the query's own block and has no dense layer
  group            4 prompts x 8 samples; the paper: 8 samples, number of prompts not given
  optimizer        AdamW, lr 5e-5, 60 steps, fp32; phi: 5 times this rate, rank 32, lambda 0.001, KL by k2.
                   The paper gives no values
  correction       obrs for all arms whose behavior policy is not the trained policy, as in the paper
                   (Jackpot); aggregation by sequence mean as in its equation 4
  score            of the last step; the paper's Table 1 has the best score of the whole run
  distill_warmed   the paper has no such phase: phi takes 20 steps on KL(sparse, dense) alone before step 1.
                   A constant reward makes all advantages 0, so theta does not change
  dense_long       one pair of arms with 16 registers and responses of 2.4K tokens, block 8, 288 tokens
                   (12%)
  draft            a model of 2 layers and width 128 generates (the paper: 1.7B for 4B); without its page
                   selection
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.insert(0, str(ROOT / "bench"))
import sparse_report  # noqa: E402
from command_line import add_bough, parser_of, run_part  # noqa: E402
from run_results import once_begun, read_metrics, write_aside, write_record  # noqa: E402
from trace_task import WarmModel, source  # noqa: E402

NUM_TRAINED = 8  # samples of a prompt
MAIN_SEEDS = 5


@dataclasses.dataclass(frozen=True)
class Arm:
    mode: str  # of sparse_training.mode, or dense
    seeds: int = 3
    task: str = "trace"
    budget: int = 144
    block: int = 4
    sink: int = 16
    recent: int = 32
    dense_layers: int = 2
    samples: int = NUM_TRAINED  # generated per prompt; the best NUM_TRAINED are trained
    warms_phi: bool = False
    extra: tuple = ()  # further settings of the run

    def engine_settings(self):
        """Settings of sparse generation and evaluation; none if the behavior policy is dense."""
        if self.mode in ("dense", "draft"):
            return []
        settings = {"budget": self.budget, "dense_layers": self.dense_layers}
        if self.mode == "exact_top_k":
            settings["summary"] = "exact"
        else:
            settings |= {"block": self.block, "sink_tokens": self.sink, "recent_tokens": self.recent}
        return [f"rollout.sparse.{key}={value}" for key, value in settings.items()]


ARMS = {
    "dense": Arm("dense", MAIN_SEEDS),
    "sparse": Arm("sparse", MAIN_SEEDS),
    "distill": Arm("distill", MAIN_SEEDS),
    "sparse_to_sparse": Arm("sparse_to_sparse"),
    "distill_16": Arm("distill", samples=16),
    "distill_12": Arm("distill", samples=12),
    "exact_top_k": Arm("exact_top_k"),
    "sparse_100": Arm("sparse", budget=100),
    "distill_100": Arm("distill", budget=100),
    "distill_warmed": Arm("distill", warms_phi=True),
    "distill_own_block": Arm("distill", sink=0, recent=1, dense_layers=0),
    "dense_long": Arm("dense", 1, task="long", block=8, budget=288),
    "distill_long": Arm("distill", 1, task="long", block=8, budget=288),
    "draft": Arm("draft"),
}
BY_SAMPLE = ("actor.correction=tis", "actor.correction_level=sequence")
# The search for a cause if distill falls behind (--explore): one change at a time, and as many for dense. A
# text is a setting, fields replace those of the arm. Its seeds and programs are not those of the experiment.
# A stronger warm model is a search of its own, with --warm-slips 0.009, --out and --results.
LEVERS = {
    "dense": {
        "half": "actor.optimizer.lr=2.5e-5",
        "double": "actor.optimizer.lr=1e-4",
        "clip_higher": "actor.eps_clip_higher=0.28",
        "signal": "actor.dynamic_sampling=true",
        "token": "actor.loss_aggregation=token_mean",
        "beta": "actor.optimizer.beta2=0.95",
        "epochs": "actor.ppo_n_minibatches=2",
        "gspo": "actor.loss=gspo",
        "clip": "actor.optimizer.gradient_clipping=0.5",
    },
    "distill": {
        "warmed": {"warms_phi": True},
        "lambda": "sparse_training.kl_loss_coef=0.1",
        # A token's KL gradient is weighted by lambda · |log(sparse / dense)|, that of PPO by |advantage|.
        # On `trace` this log-ratio is about 0.05, so with 100 the KL outweighs PPO.
        "lambda_100": "sparse_training.kl_loss_coef=100",
        "signal": "actor.dynamic_sampling=true",
        "fast": "sparse_training.lr_ratio=20",
        "tis": "actor.correction=tis",
        # A wrong token of the sparse policy decides the reward of its sample. obrs leaves this token out, and
        # the other tokens get the blame. A weight of the whole sample leaves out the sample.
        "sequence": {"extra": BY_SAMPLE},
        "sequence_lambda": {"extra": (*BY_SAMPLE, "sparse_training.kl_loss_coef=100")},
        "replay": "rollout.sparse.replay=true",
    },
}
EXPLORED = {name: dataclasses.replace(ARMS[name], seeds=3) for name in LEVERS}
for pair in zip(
    *[[(arm, *lever) for lever in levers.items()] for arm, levers in LEVERS.items()], strict=True
):
    for arm, name, change in pair:
        fields = change if isinstance(change, dict) else {"extra": (change,)}
        EXPLORED[f"{arm}_{name}"] = dataclasses.replace(EXPLORED[arm], **fields)


def parse_arguments(arguments=None):
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_bough(parser)
    add("--out", type=Path, help="folder of models and runs (default: runs/sparse_ablation)")
    add("--results", type=Path, help="folder of the results (default: bench/sparse_results)")
    add("--explore", action="store_true", help="single settings of distill and dense, seeds 11 to 13")
    add("--arms", nargs="+", choices=[*ARMS, *EXPLORED], metavar="ARM", help="default: all")
    add("--seeds", type=int, nargs="+", help="default: 1 to 5, with --explore 11 to 13")
    add("--hours", type=float, help="machine time of all results; 0: no limit (default: 6, with --explore 2)")
    add("--threads", type=int, default=2, help="threads of all programs; the warm model depends on them")
    add(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="N of these commands run at once, with other --seeds: each has 1/N of the threads, and its time "
        "counts 1/N",
    )
    add("--steps", type=int, default=60)
    add("--prompts", type=int, default=4, help="prompts per step")
    add("--lr", type=float, default=5e-5)
    add("--correction", default="obrs")
    add("--kl", type=float, default=0.001, help="lambda: sparse_training.kl_loss_coef")
    add("--phi-steps", type=int, default=20, help="steps of distill_warmed before step 1")
    add("--train-programs", type=int, default=4000)
    add("--test-programs", type=int, default=256)
    add("--test-samples", type=int, default=4)
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
    add("--warm-lr", type=float, default=1e-3)
    add("--warm-dtype", default="bf16")
    add("--warm-slips", type=float, default=0.013, help="share of wrong steps in whole demonstrations")
    add("--task", nargs="*", default=[], metavar="FIELD=VALUE", help="other programs or another model")
    add("--settings", nargs="*", default=[], help="further settings of every run")
    add("--sparse-settings", nargs="*", default=[], help="further settings of sparse generation")
    add("--table-only", action="store_true", help="only write the tables of existing results")
    args = parser.parse_args(arguments)
    kind = "explore" if args.explore else "sparse_ablation"
    args.out = (args.out or ROOT / "runs" / kind).resolve()
    args.results = args.results or ROOT / "bench" / ("sparse_explore" if args.explore else "sparse_results")
    args.hours = args.hours if args.hours is not None else 2 if args.explore else 6
    args.seeds = args.seeds or ([11, 12, 13] if args.explore else list(range(1, MAIN_SEEDS + 1)))
    return args


class Experiment:
    def __init__(self, args):
        self.args = args
        self.out = args.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.all_arms = EXPLORED if args.explore else ARMS
        self.arms = {name: self.all_arms[name] for name in args.arms or self.all_arms}
        self.warms = {}

    def bough(self, *command, log="data.log", watch=None):
        threads = max(1, self.args.threads // self.args.share)
        run_part([self.args.bough, *command], self.out / log, watch, OMP_NUM_THREADS=str(threads))

    def warm(self, task):
        """The warm model of a task, made if it does not exist."""
        if task not in self.warms:
            self.warms[task] = WarmModel(self, task)
            settings = [] if task == "draft" else self.sparse_settings(self.sparse_arm(task))
            self.warms[task].record(settings)
        return self.warms[task]

    def sparse_arm(self, task):
        """The arm whose page selection scores weights that were not trained for any."""
        return self.all_arms["distill_long" if task == "long" else "distill"]

    # ---- Which runs are missing, and whether their time suffices.

    def cases(self):
        """Pairs (arm, seed), by seed: the arms with priority first, and dense first of all."""
        order = [name for name in self.arms if self.arms[name].seeds == MAIN_SEEDS]
        order += [name for name in self.arms if name not in order]
        return [(arm, seed) for seed in self.args.seeds for arm in order if self.has_seed(arm, seed)]

    def has_seed(self, arm, seed):
        return seed - (11 if self.args.explore else 1) < self.arms[arm].seeds

    def is_needed(self, case, results):
        """Whether a run is missing. One of another warm model is missing if a pair needs it from this one."""
        arm, seed = case
        warm = self.warms.get(self.arms[arm].task)
        runs = results.of_seed(arm, seed)
        if not runs:
            return True
        if warm and any(run["warm"] == warm.results.name for run in runs):
            return False
        partners = sparse_report.partners_of(arm, self.all_arms) & set(self.arms)
        return any(
            self.has_seed(other, seed) and all(run["seed"] != seed for run, _ in results.pairs(arm, other))
            for other in partners
        )

    def print_forecast(self, record, name, results):
        seconds = record["time/step"]
        minutes = seconds * self.args.steps / 60
        missing = [case for case in self.cases() if self.is_needed(case, results)]
        hours = self.forecast(missing, results, seconds, name) / 3600
        print(
            f"forecast after step {record['step']}: {minutes:.0f} minutes of training; "
            f"{len(missing)} missing runs take {hours:.1f} hours, {results.seconds() / 3600:.1f} of "
            f"{self.args.hours:g} are used",
            flush=True,
        )

    def forecast(self, cases, results, step_seconds=None, arm=None):
        """Seconds of runs: means of finished runs of their arm, or of all. step_seconds: a step of `arm`."""
        known = {}
        for run in results.runs:
            known.setdefault(run["arm"], []).append(sum(run["seconds"].values()))
        if step_seconds is not None:
            known.setdefault(arm, [step_seconds * self.args.steps])
        mean = statistics.mean(value for values in known.values() for value in values) if known else 0
        return sum(statistics.mean(known.get(name, [mean])) for name, _ in cases)

    def run(self):
        for case in self.cases():
            results = sparse_report.Results(self.args.results, self.all_arms)
            if not self.is_needed(case, results):
                continue
            arm, seed = case
            self.warm(self.arms[arm].task)
            if not self.is_needed(case, results):  # this warm model has the run already
                continue
            left = 3600 * self.args.hours - results.seconds() if self.args.hours > 0 else float("inf")
            reserved = [] if self.arms[arm].seeds == MAIN_SEEDS else self.missing_main(results)
            needed = self.forecast([case, *reserved], results)
            if needed > left:
                print(f"not enough time for {arm}, seed {seed}: {needed / 60:.0f} of {left / 60:.0f} minutes")
                continue
            self.train_and_score(arm, seed, results)

    def missing_main(self, results):
        return [
            case
            for case in self.cases()
            if self.arms[case[0]].seeds == MAIN_SEEDS and self.is_needed(case, results)
        ]

    # ---- A run.

    def settings(self, arm, seed, warm):
        args = self.args
        settings = {
            "fileroot": self.out,
            "experiment_name": "runs",
            "seed": seed,
            "model.path": warm.folder / "warm",
            "train_dataset.path": warm.data("train"),
            "train_dataset.batch_size": args.prompts,
            "gconfig.n_samples": arm.samples,
            "gconfig.max_new_tokens": warm.max_new_tokens(),
            "actor.loss_aggregation": "sequence_mean",
            "actor.optimizer.lr": args.lr,
            "actor.optimizer.weight_decay": 0,
            "saver.freq_steps": 10,
            "saver.keep": 1,
        }
        if arm.samples > NUM_TRAINED:
            settings["actor.keep_samples"] = NUM_TRAINED
        if arm.mode not in ("dense", "sparse_to_sparse"):  # the behavior policy is not the trained policy
            settings["actor.correction"] = args.correction
            settings["gconfig.top_logprobs"] = 20
        if arm.mode != "dense":
            settings["sparse_training.mode"] = arm.mode
        if arm.mode in ("distill", "draft"):
            settings["sparse_training.kl_loss_coef"] = args.kl
        if arm.mode == "draft":
            settings["sparse_training.draft_path"] = self.warm("draft").folder / "warm"
        lines = [f"{key}={value}" for key, value in settings.items()] + self.sparse_settings(arm)
        return lines + list(arm.extra) + list(args.settings)

    def sparse_settings(self, arm):
        settings = arm.engine_settings()
        return settings + list(self.args.sparse_settings) if settings else []

    def train(self, name, settings, steps, watch):
        folder = self.out / "runs" / name
        records = read_metrics(folder)
        if not records or records[-1]["step"] < steps:
            words = [*settings, f"trial_name={name}", f"total_train_steps={steps}"]
            self.bough("train", ROOT / "configs/trace.yaml", *words, log="train.log", watch=watch)
        return folder, folder / "checkpoints" / (folder / "latest").read_text().strip()

    def warm_phi(self, name, settings):
        """The folder of phi after steps on the KL alone, with theta frozen by rewards that are all equal."""
        reward = self.out / "constant_reward.py"
        write_aside(reward, "def constant(completion, **fields):\n    return 0.0\n")
        # With lambda 0.001 and no other term, gradients would be as small as Adam's epsilon.
        settings = [*settings, f"reward={reward}:constant", "sparse_training.kl_loss_coef=1"]
        folder, checkpoint = self.train(f"{name}-phi", settings, self.args.phi_steps, None)
        return checkpoint / "sparse_adapter", sum(record["time/step"] for record in read_metrics(folder))

    def train_and_score(self, name, seed, results):
        arm = self.arms[name]
        warm = self.warm(arm.task)
        settings = self.settings(arm, seed, warm)
        run = f"{warm.results.name}-{name}-seed{seed}"
        print(f"{name}, seed {seed}", flush=True)
        seconds = {}
        if arm.warms_phi:
            phi, seconds["phi"] = self.warm_phi(run, settings)
            settings.append(f"sparse_training.lora.path={phi}")
        watch = once_begun(self.out / "runs" / run, lambda record: self.print_forecast(record, name, results))
        folder, checkpoint = self.train(run, settings, self.args.steps, watch)
        records = [record for record in read_metrics(folder) if record["step"] > 0]
        seconds["train"] = sum(record["time/step"] for record in records)
        begin = time.monotonic()
        scores = self.score(name, warm, checkpoint)
        seconds["evaluation"] = time.monotonic() - begin
        given = {key: getattr(self.args, key) for key in ("steps", "prompts", "lr", "correction", "kl")}
        given |= {"settings": self.args.settings, "sparse_settings": self.args.sparse_settings}
        record = {
            "arm": name,
            "seed": seed,
            "share": self.args.share,
            "definition": dataclasses.asdict(arm),
            "given": given,
            **source(),
        }
        record |= {"seconds": {key: round(value, 1) for key, value in seconds.items()}}
        record |= sparse_report.summary(records, self.args.prompts) | scores
        write_record(warm.results / f"{name}-seed{seed}.json", record)

    def score(self, name, warm, checkpoint):
        """Scores of the trained weights, and of the policy that samples sparsely or is a draft policy."""
        arm = self.arms[name]
        model = checkpoint / "model"
        scores = {"dense": warm.evaluate(model, [])}
        if arm.mode == "dense":  # without any training for sparse attention
            scores["sparse"] = warm.evaluate(model, self.sparse_settings(self.sparse_arm(arm.task)))
        elif arm.mode == "distill":
            with tempfile.TemporaryDirectory(dir=self.out) as folder:
                merged = Path(folder) / "model"
                self.bough("merge", model, checkpoint / "sparse_adapter", merged, log="eval.log")
                scores["sparse"] = warm.evaluate(merged, self.sparse_settings(arm))
        elif arm.mode == "draft":
            scores["draft"] = warm.evaluate(checkpoint / "weak/model", [])
        elif arm.mode != "exact_top_k":  # in plain loops its evaluation takes longer than its training
            scores["sparse"] = warm.evaluate(model, self.sparse_settings(arm))
        return scores


def main():
    args = parse_arguments()
    experiment = Experiment(args)
    if not args.table_only:
        experiment.run()
    results = sparse_report.Results(args.results, experiment.all_arms)
    text = sparse_report.tables(results)
    write_aside(args.out / "table.md", text)
    write_aside(args.out / "curves.svg", sparse_report.figure(results))
    print(text, end="")


if __name__ == "__main__":
    main()

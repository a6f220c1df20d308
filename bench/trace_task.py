"""The task `trace` of bench/sparse_ablation.py: programs, a warm model, and scores of models."""

import dataclasses
import json
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from run_results import folder_of_results, keep_settings, write_aside, write_record

ROOT = Path(__file__).resolve().parent.parent
MOST_PARAMETERS = 5_000_000


@dataclasses.dataclass(frozen=True)
class Task:
    """Programs, and the shape of the model that learns them."""

    registers: int = 5
    steps: tuple = (46, 60)
    hidden_size: int = 192
    layers: int = 4


TASKS = {
    "trace": Task(),
    "long": Task(registers=16, steps=(50, 60)),
    "draft": Task(hidden_size=128, layers=2),
}


class WarmModel:
    """The data and the warm model of one task, under OUT/TASK, and its folder of results."""

    def __init__(self, experiment, name):
        self.experiment = experiment
        self.args = experiment.args
        self.name = name
        self.folder = experiment.out / name
        self.folder.mkdir(parents=True, exist_ok=True)
        changed = dict(field.split("=") for field in self.args.task)
        changed = {key: json.loads(value) for key, value in changed.items()}
        self.task = dataclasses.replace(TASKS[name], **changed)
        self.data_seed = 21 if self.args.explore else 1
        self.prepare()
        self.results = self.args.results / folder_of_results(name, self.folder / "warm")

    def settings(self):
        args = vars(self.args)
        names = ["train_programs", "test_programs", "test_samples", "lessons", "lesson_programs"]
        names += ["warm_programs", "warm_steps", "warm_lr", "warm_dtype", "warm_slips", "threads"]
        settings = {name: args[name] for name in names} | dataclasses.asdict(self.task)
        return json.loads(json.dumps(settings | {"data_seed": self.data_seed}))

    def prepare(self):
        args, task = self.args, self.task
        keep_settings(self.folder / "warm_settings.json", self.settings())
        least, most = task.steps
        self.make_data("train", args.train_programs, [least, most], split="train")
        self.make_data("test", args.test_programs, [least, most], split="test")
        if not (self.folder / "base/model.safetensors").exists():
            shape = ["--layers", task.layers, "--hidden-size", task.hidden_size, "--head-dim", 32]
            shape += ["--heads", 6, "--kv-heads", 3, "--tie"]
            self.experiment.bough("init", self.folder / "base", "--force", *shape)
        parameters = count_parameters(self.folder / "base/model.safetensors")
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
        self.fine_tune(model, "warm", 8, args.warm_steps)

    def make_data(self, name, count, program_steps, *options, split="train", seed=None):
        if not self.data(name).exists():
            task = ["--registers", self.task.registers, "--split", split, "-n", count]
            task += ["--seed", seed or self.data_seed]
            task += ["--min-steps", program_steps[0], "--max-steps", program_steps[1]]
            self.experiment.bough("data", "trace", "--out", self.data(name), *task, *options)

    def fine_tune(self, model, name, batch, steps):
        """Trains the model `name` from `model` on the data called `name`."""
        if not (self.folder / name / "model.safetensors").exists():
            where = ["--model", self.folder / model, "--data", self.data(name), "--out", self.folder / name]
            effort = ["--batch-size", batch, "--lr", self.args.warm_lr, "--max-steps", steps]
            effort += ["--epochs", 1000, "--dtype", self.args.warm_dtype]
            begin = time.monotonic()
            self.experiment.bough("sft", *where, *effort, log=f"{self.name}-{name}.log")
            made = {"seconds": round(time.monotonic() - begin, 1), **source()}
            write_aside(self.folder / name / "made.json", json.dumps(made))

    def data(self, name):
        return self.folder / f"{name}.jsonl"

    def max_new_tokens(self):
        """One byte is one token."""
        lines = self.data("train").read_text().splitlines()
        return max(len(json.loads(line)["answer"]) for line in lines) + 17

    def record(self, sparse_settings):
        """Scores the warm model, unless RESULTS has its scores. sparse_settings: of the sparse score."""
        path = self.results / "warm.json"
        if path.exists():
            return
        begin = time.monotonic()
        scores = {"dense": self.evaluate(self.folder / "warm", [])}
        if sparse_settings:
            scores["sparse"] = self.evaluate(self.folder / "warm", sparse_settings)
        seconds = {"evaluation": round(time.monotonic() - begin, 1)}
        files = sorted(self.folder.glob("*/made.json"))
        made = {file.parent.name: json.loads(file.read_text()) for file in files}
        seconds |= {model: record.pop("seconds") for model, record in made.items()}
        record = {
            "task": self.name,
            "settings": self.settings(),
            "made": made.get("warm"),
            "scored": source(),
        }
        write_record(path, record | {"seconds": seconds, **scores})

    def evaluate(self, model, engine_settings):
        """Scores of samples for the test programs."""
        problems = [json.loads(line) for line in self.data("test").read_text().splitlines()]
        prompts = self.folder / "prompts.jsonl"
        if not prompts.exists():  # the prompts of `format: text`
            lines = [json.dumps({"prompt": f"Q: {problem['question']}\nA:"}) + "\n" for problem in problems]
            write_aside(prompts, "".join(lines))
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            samples = Path(folder) / "samples.jsonl"
            words = ["--model", model, "--prompts", prompts, "--out", samples]
            words += ["--n-samples", self.args.test_samples, "--max-new-tokens", self.max_new_tokens()]
            self.experiment.bough("rollout", *words, *engine_settings, log="eval.log")
            with samples.open() as file:
                return score_samples(problems, map(json.loads, file))


def score_samples(problems, records):
    """Shares of right final numbers and lines; `right` has one digit per program: its right samples."""
    right = [0] * len(problems)
    until_error, lines_right, lengths = [], [], []
    for record in records:
        program = int(record["group"]) - 1
        begin = record["loss_mask"].index(1)
        ids = record["input_ids"][begin:]
        text = bytes(token for token in ids if token < 256).decode(errors="replace")
        *worked, number = problems[program]["answer"].split("\n")
        found = re.search(r"####\s*(\d+)\s*$", text)
        right[program] += found is not None and int(found[1]) == int(number.removeprefix("####"))
        equal = [a == b for a, b in zip(text.strip().split("\n"), worked, strict=False)]
        until_error.append((equal.index(False) if False in equal else len(equal)) / len(worked))
        lines_right.append(sum(equal) / len(worked))
        lengths.append(len(ids))
    return {
        "score": round(sum(right) / len(lengths), 5),
        "until_error": round(statistics.mean(until_error), 5),
        "lines": round(statistics.mean(lines_right), 5),
        "length": round(statistics.mean(lengths), 1),
        "right": "".join(map(str, right)),
    }


def source():
    """What a result depends on beside its settings."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True)
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {"commit": commit.stdout.strip(), "cpu": models[0] if models else "unknown"}


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

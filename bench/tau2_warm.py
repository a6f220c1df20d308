"""Data, tokenizer and warm model of bench/tau2_training.py, and the processes that make them."""

import argparse
import contextlib
import json
import shutil
import subprocess
import time
from pathlib import Path

import tau2_report
from command_line import run_part
from run_results import keep_settings, write_aside

CONVERSATIONS = ["workers=300", "max_turns=40", "max_invalid_calls=0", "tool_call_parser=hermes"]
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tau2"


class WarmExperiment:
    """An experiment up to its warm model, in the folder OUT."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.out = args.out
        self.out.mkdir(parents=True, exist_ok=True)

    # ---- Processes.

    def call(self, words, log, watch=None):
        run_part(words, self.out / log, watch, folder=self.out, OMP_NUM_THREADS=str(self.args.threads))

    def bough(self, *words, log, watch=None):
        self.call([self.args.bough, *words], log, watch)

    def tau2(self, script, *words):
        self.call([self.args.python, EXAMPLE / script, *words], "tau2.log")

    @contextlib.contextmanager
    def server(self):
        """The URL of a server that holds conversations."""
        words = [self.args.python, EXAMPLE / "tau2_server.py", "--port", "0"]
        with (self.out / "tau2.log").open("a") as log:
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise SystemExit(f"tau2_server.py ended; see {self.out / 'tau2.log'}")
            yield url
        finally:
            process.terminate()
            process.wait()

    # ---- Data and the warm model.

    def settings(self):
        """The settings of data and warm model."""
        names = ["slips", "demonstrations", "further_tasks", "further_demonstrations", "vocab_size"]
        names += ["layers", "hidden_size", "warm_parts", "warm_enough", "warm_batch", "dtype", "threads"]
        names += ["train_tasks", "test_tasks", "held_out"]
        return {name: getattr(self.args, name) for name in names}

    def make_once(self, name, make):
        """Makes the file or folder OUT/name with make(path), unless it exists. Keeps its seconds beside."""
        path = self.out / name
        if not path.exists():
            begin = time.monotonic()
            aside = path.with_name(f"{path.name}.part")
            make(aside)
            aside.rename(path)
            write_aside(self.out / f"{name}.seconds", f"{time.monotonic() - begin:.1f}")
        return path

    def prepare(self):
        args = self.args
        keep_settings(self.out / "settings.json", self.settings())
        self.make_problems("train", "--split", "train", "-n", args.train_tasks)
        self.make_problems("test", "--split", "test", "-n", args.test_tasks)
        others = ["--without", "train", "test"]
        self.make_problems("held_out", *others, "-n", args.held_out)
        self.make_problems("further", *others, "--skip", args.held_out, "-n", args.further_tasks)
        self.make_traces("train", args.demonstrations, seed=0)
        self.make_traces("further", args.further_demonstrations, seed=100_000)
        self.make_once("demonstrations.jsonl", self.join_traces)
        self.make_once("base", self.make_base)
        self.make_once("warm", self.warm_up)

    def warm_up(self, out):
        """Parts of the warm-up until one is good enough. `out` is a copy of the last."""
        model = "base"
        for number, part in enumerate(self.args.warm_parts, start=1):
            name = f"part{number}"
            self.make_once(name, lambda out, a=(model, number, part): self.fine_tune(out, *a))
            model = name
            self.make_once(f"{name}.json", lambda out, name=name: self.score_part(name, out))
            success = tau2_report.mean_success(self.part_scores()[name])
            print(f"success on the train split: {success:.3f}", flush=True)
            if success >= self.args.warm_enough:
                break
        shutil.copytree(self.out / model, out)

    def score_part(self, name, out):
        out.write_text(json.dumps(self.sample(name, "train", 2)))

    def part_scores(self):
        """Scores of the parts of the warm-up with the train split."""
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.out.glob("part*.json"))}

    def make_problems(self, name, *words):
        make = lambda out: self.tau2("tau2_problems.py", "telecom", *words, "--out", out)  # noqa: E731
        self.make_once(f"{name}.jsonl", make)

    def make_traces(self, name, samples, seed):
        words = ["traces", "--whole", "--problems", f"{name}.jsonl", "--slips", self.args.slips]
        words += ["--samples", samples, "--seed", seed, "--out"]
        self.make_once(f"{name}_traces.jsonl", lambda out: self.tau2("tau2_play.py", *words, out))

    def join_traces(self, out):
        out.write_text(
            "".join((self.out / f"{name}_traces.jsonl").read_text() for name in ("train", "further"))
        )

    def make_base(self, out):
        """Random weights, and byte pairs of the text of the train split."""
        args = self.args
        shape = ["--vocab-size", args.vocab_size, "--max-positions", 16384, "--tie", "--head-dim", 64]
        shape += ["--hidden-size", args.hidden_size, "--layers", args.layers]
        shape += ["--heads", args.hidden_size // 64, "--kv-heads", max(1, args.hidden_size // 128)]
        self.bough("init", out, "--force", *shape, log="warm.log")
        words = ["--examples", "train_traces.jsonl", "--model", out, "--vocab-size", args.vocab_size]
        self.tau2("tau2_tokenizer.py", *words)

    def fine_tune(self, out, model, number, part):
        lr, steps = part.split(":")
        words = ["--model", self.out / model, "--data", "demonstrations.jsonl", "--out", out, "--lr", lr]
        words += ["--max-steps", steps, "--batch-size", self.args.warm_batch, "--seed", number]
        words += ["--dtype", self.args.dtype, "--threads", self.args.threads, "optimizer.beta2=0.95"]
        print(f"warm-up, part {number}: {steps} steps", flush=True)
        self.bough("sft", *words, log="warm.log")

    def warm_seconds(self):
        """Seconds of all files and folders up to the warm model, which is a copy of a part."""
        files = {path.stem: path for path in sorted(self.out.glob("*.seconds"))}
        return {
            name: float(files[name].read_text()) for name in sorted(files.keys() - {"lists.json", "warm"})
        }

    def sample(self, model, name, samples):
        """Scores of sampled conversations with the tasks of a set."""
        path = self.out / "samples.jsonl"
        with self.server() as url:
            words = ["--model", model, "--prompts", f"{name}.jsonl", "--n-samples", samples, "--out", path]
            words += ["--max-new-tokens", 64, "--dtype", self.args.dtype, "--threads", self.args.threads]
            words += ["--max-concurrent", 256, "--environment", "http", f"url={url}", *CONVERSATIONS]
            self.bough("rollout", *words, log="eval.log")
        ids = [json.loads(line)["id"] for line in (self.out / f"{name}.jsonl").read_text().splitlines()]
        with path.open() as file:
            scores = tau2_report.score_conversations(ids, map(json.loads, file))
        path.unlink()
        return scores

#!/usr/bin/env python3
"""How long do generation and a whole training step take, beside transformers' generate and TRL?

generation: `bough bench rollout` and the yardstick's peer_generate.py, 128 samples in 16 groups of random
prompts. training: `bough train` and the yardstick's peer_trl.py, GRPO on two-digit sums, 16 prompts x 8
samples of 64 new tokens a step (generation, rewards, loss, gradients, optimizer); the first step, which warms
up, is not counted. Shape `small`, random weights; runs alternate, medians over the rounds; a ratio above 1
says that Bough is faster.

Needs the yardstick's folder (BOUGH_YARDSTICK, else ../shared/yardstick); for TRL a Python that has trl,
datasets and accelerate (--trl-python), else it is left out, and said.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from peers import ROOT, TORCH_DTYPES, YARDSTICK, aligned, is_missing, peers_environment, run_json, say

SHAPE = (
    "--hidden-size 512 --layers 8 --heads 8 --kv-heads 4 --head-dim 64 --intermediate-size 1536 "
    "--vocab-size 4096 --tie"
)
TRAINING = """\
experiment_name: bench
trial_name: trl
train_dataset: { batch_size: 16 }
gconfig: { n_samples: 8, max_new_tokens: 64, ignore_eos: true }
total_train_steps: 4
evaluator: { at_start: false, at_end: false }
saver: { rollouts: false }
"""


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="\n".join(__doc__.splitlines()[2:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--generate", nargs="*", default=["32/64", "32/256", "1024/64"], help="prompt/new tokens"
    )
    parser.add_argument("--train", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtypes", nargs="+", choices=TORCH_DTYPES, default=list(TORCH_DTYPES))
    parser.add_argument("--rounds", type=int, default=2, help="repetitions, in turns (2)")
    parser.add_argument("--bough", type=Path, default=ROOT / "build/bin/bough")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv/bin/python", help="has transformers")
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv/bin/python", help="has trl")
    return parser.parse_args()


class Bench:
    def __init__(self, args, folder):
        self.args = args
        self.folder = folder
        self.environment = peers_environment()
        self.model = folder / "model"
        command = [args.bough, "init", self.model, *SHAPE.split()]
        subprocess.run([str(word) for word in command], check=True, capture_output=True)
        sums = [(10 + i * 7 % 90, 10 + i * 13 % 90) for i in range(1024)]
        lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in sums]
        (folder / "grpo.yaml").write_text(TRAINING)
        (folder / "sums.jsonl").write_text("\n".join(lines) + "\n")

    def generate(self, case, dtype):
        """Seconds of Bough and of transformers, and the part of Bough's bound that was reached."""
        prompt, new = case.split("/")
        ours = run_json(
            [self.args.bough, "bench", "rollout", "--model", self.model, "--dtype", dtype, "--json"]
            + ["--prompt-tokens", prompt, "--max-new-tokens", new, "--no-batch-invariant"]
        )
        peer = run_json(
            [self.args.python, YARDSTICK / "peer_generate.py", "--prompt", prompt, "--new", new]
            + ["--dtype", TORCH_DTYPES[dtype]],
            self.environment,
        )
        return ours["seconds"], peer["s"], ours["bound_fraction"]

    def train(self, dtype):
        """Seconds a step of Bough and of TRL, the median of those after the first."""
        with tempfile.TemporaryDirectory(dir=self.folder) as runs:
            settings = [f"fileroot={runs}", f"dtype={dtype}", f"model.path={self.model}"]
            settings += [f"train_dataset.path={self.folder / 'sums.jsonl'}"]
            run_json([self.args.bough, "train", self.folder / "grpo.yaml", *settings, "--json"])
            metrics = (Path(runs) / "bench/trl/metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in metrics]
        ours = [step["time/step"] for step in steps if "time/step" in step]
        peer = run_json([self.args.trl_python, YARDSTICK / "peer_trl.py", dtype], self.environment)
        return statistics.median(ours[1:]), statistics.median(peer["s_per_step"])


def has_trl(python):
    found = subprocess.run([str(python), "-c", "import trl, datasets, accelerate"], capture_output=True)
    return found.returncode == 0


def main():
    args = parse_arguments()
    if is_missing("peer_generate.py") or is_missing("peer_trl.py"):
        return 0
    jobs = [(case, dtype) for case in args.generate for dtype in args.dtypes]
    if args.train and has_trl(args.trl_python):
        jobs += [("train", dtype) for dtype in args.dtypes]
    elif args.train:
        say(f"run_vs_peers: TRL left out: no trl, datasets, accelerate for {args.trl_python} (--trl-python)")
    runs = {job: [] for job in jobs}
    with tempfile.TemporaryDirectory(prefix="run_vs_peers_") as folder:
        bench = Bench(args, Path(folder))
        for number in range(1, args.rounds + 1):
            for job, results in runs.items():
                case, dtype = job
                results.append(bench.train(dtype) if case == "train" else bench.generate(case, dtype))
                ours, peer = results[-1][:2]
                say(f"round {number}/{args.rounds}  {case} {dtype}: {ours:.2f} s, peer {peer:.2f} s")
    lines = [["prompt/new or job", "dtype", "Bough, s", "peer, s", "peer/Bough", "of the bound"]]
    for (case, dtype), results in runs.items():
        ours, peer = (statistics.median(result[i] for result in results) for i in (0, 1))
        part = f"{statistics.median(r[2] for r in results):.0%}" if len(results[0]) > 2 else ""
        lines.append([case, dtype, f"{ours:.2f}", f"{peer:.2f}", f"{peer / ours:.1f}", part])
    print("medians; peers: transformers' generate, TRL's GRPO step (`train`)")
    print(aligned(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""How long do generation and a whole training step take, beside transformers' generate and TRL?

generation: `bough bench rollout` and bench/peer_generate.py, 128 samples in 16 groups of random prompts.
training: `bough train` and bench/peer_trl.py, GRPO on two-digit sums, 16 prompts x 8 samples of 64 new
tokens a step (generation, rewards, loss, gradients, optimizer); the first step, which warms up, is not
counted. Random weights; runs alternate, medians over the rounds; a ratio above 1 says that Bough is faster.

`make bench-peers` runs it with the pinned peers.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from peers import (
    BENCH,
    BOUGH_SHAPES,
    TORCH_DTYPES,
    add_program_options,
    aligned,
    check_programs,
    init_model,
    peers_environment,
    run_json,
    say,
)

TRAINING = """\
experiment_name: bench
trial_name: trl
train_dataset: { batch_size: 16 }
gconfig: { n_samples: 8, ignore_eos: true }
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
    parser.add_argument("--shape", choices=BOUGH_SHAPES, default="small", help="the model's (small)")
    parser.add_argument("--train-new", type=int, default=64, help="tokens of a sample in training (64)")
    parser.add_argument(
        "--quick", action="store_true", help="few tokens, tiny model, one round: does it run?"
    )
    add_program_options(parser)
    args = parser.parse_args()
    if args.quick:
        args.generate, args.shape, args.train_new, args.rounds = ["8/8"], "tiny", 8, 1
    return args


class Bench:
    def __init__(self, args, folder):
        self.args = args
        self.folder = folder
        self.environment = peers_environment()
        self.model = folder / "model"
        init_model(args.bough, self.model, args.shape)
        sums = [(10 + i * 7 % 90, 10 + i * 13 % 90) for i in range(1024)]
        lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in sums]
        (folder / "grpo.yaml").write_text(TRAINING)
        (folder / "sums.jsonl").write_text("\n".join(lines) + "\n")

    def run_peer(self, script, *words):
        shared = ["--model", self.args.shape, "--threads", self.args.threads]
        return run_json([self.args.python, "-B", BENCH / script, *words, *shared], self.environment)

    def generate(self, case, dtype):
        """Seconds of Bough and of transformers, and the part of Bough's bound that was reached."""
        prompt, new = case.split("/")
        ours = run_json(
            [self.args.bough, "bench", "rollout", "--model", self.model, "--dtype", dtype, "--json"]
            + ["--prompt-tokens", prompt, "--max-new-tokens", new, "--no-batch-invariant"]
            + ["--threads", self.args.threads]
        )
        size = ["--prompt", prompt, "--new", new]
        peer = self.run_peer("peer_generate.py", *size, "--dtype", TORCH_DTYPES[dtype])
        return ours["seconds"], peer["s"], ours["bound_fraction"]

    def train(self, dtype):
        """Seconds a step of Bough and of TRL, the median of those after the first."""
        with tempfile.TemporaryDirectory(dir=self.folder) as runs:
            settings = [f"fileroot={runs}", f"dtype={dtype}", f"model.path={self.model}"]
            settings += [f"train_dataset.path={self.folder / 'sums.jsonl'}"]
            settings += [f"threads={self.args.threads}", f"gconfig.max_new_tokens={self.args.train_new}"]
            run_json([self.args.bough, "train", self.folder / "grpo.yaml", *settings, "--json"])
            metrics = (Path(runs) / "bench/trl/metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in metrics]
        ours = [step["time/step"] for step in steps if "time/step" in step]
        peer = self.run_peer("peer_trl.py", dtype, "--new", self.args.train_new)
        return statistics.median(ours[1:]), statistics.median(peer["s_per_step"])


def main():
    args = parse_arguments()
    check_programs(args)
    jobs = [(case, dtype) for case in args.generate for dtype in args.dtypes]
    jobs += [("train", dtype) for dtype in args.dtypes if args.train]
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

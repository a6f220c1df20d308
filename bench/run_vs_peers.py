#!/usr/bin/env python3
"""Times generation and a whole training step, compared with transformers' generate, vLLM and TRL.

generation: `bough bench rollout`, bench/peer_generate.py and bench/peer_vllm.py on one model directory: 128
samples in 16 groups of random prompts.
training: `bough train` and bench/peer_trl.py: GRPO on two-digit sums, 16 prompts x 8 samples of 64 new tokens
per step (generation, rewards, loss, gradients, optimizer). The first step is a warm-up and does not count.
Weights are random. Runs alternate; the figures are medians over the rounds. A ratio above 1 means that Bough
is faster.

`make bench-peers` runs it with the pinned peers.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from peers import (
    BENCH,
    BOUGH_SHAPES,
    ROOT,
    TORCH_DTYPES,
    add_program_options,
    aligned,
    check_programs,
    init_model,
    parser_of,
    peers_environment,
    run_json,
    say,
)

SIDES = ("Bough", "transformers", "vLLM", "TRL")
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
    parser = parser_of(__doc__)
    parser.add_argument(
        "--generate", nargs="*", default=["32/64", "32/256", "1024/64"], help="prompt/new tokens"
    )
    parser.add_argument(
        "--model", type=Path, help="a Hugging Face directory to generate with (random weights of --shape)"
    )
    vllm = ROOT / ".venv-vllm/bin/python"
    parser.add_argument("--vllm-python", type=Path, default=vllm, help="Python that has vLLM (.venv-vllm)")
    parser.add_argument("--vllm", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--train", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtypes", nargs="+", choices=TORCH_DTYPES, default=list(TORCH_DTYPES))
    parser.add_argument("--rounds", type=int, default=2, help="interleaved repetitions (2)")
    parser.add_argument("--shape", choices=BOUGH_SHAPES, default="small", help="shape of the model (small)")
    parser.add_argument("--train-new", type=int, default=64, help="tokens of a sample in training (64)")
    parser.add_argument("--quick", action="store_true", help="smoke test: few tokens, tiny model, one round")
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

    def run_peer(self, python, script, *words):
        words = [*words, "--threads", self.args.threads]
        return run_json([python, "-B", BENCH / script, *words], self.environment)

    def generate(self, case, dtype):
        """Seconds of Bough and each peer, and the fraction of its bound that Bough reached."""
        prompt, new = case.split("/")
        model = self.args.model or self.model
        ours = run_json(
            [self.args.bough, "bench", "rollout", "--model", model, "--dtype", dtype, "--json"]
            + ["--prompt-tokens", prompt, "--max-new-tokens", new, "--no-batch-invariant"]
            + ["--threads", self.args.threads]
        )
        words = ["--model", model, "--prompt", prompt, "--new", new, "--dtype", TORCH_DTYPES[dtype]]
        out = {"Bough": ours["seconds"], "of the bound": ours["bound_fraction"]}
        out["transformers"] = self.run_peer(self.args.python, "peer_generate.py", *words)["s"]
        if self.args.vllm:
            out["vLLM"] = self.run_peer(self.args.vllm_python, "peer_vllm.py", *words)["s"]
        return out

    def train(self, dtype):
        """Median seconds per step of Bough and of TRL, without the first step."""
        with tempfile.TemporaryDirectory(dir=self.folder) as runs:
            settings = [f"fileroot={runs}", f"dtype={dtype}", f"model.path={self.model}"]
            settings += [f"train_dataset.path={self.folder / 'sums.jsonl'}"]
            settings += [f"threads={self.args.threads}", f"gconfig.max_new_tokens={self.args.train_new}"]
            run_json([self.args.bough, "train", self.folder / "grpo.yaml", *settings, "--json"])
            metrics = (Path(runs) / "bench/trl/metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in metrics]
        ours = [step["time/step"] for step in steps if "time/step" in step]
        words = [dtype, "--new", self.args.train_new, "--model", self.args.shape]
        peer = self.run_peer(self.args.python, "peer_trl.py", *words)
        return {"Bough": statistics.median(ours[1:]), "TRL": statistics.median(peer["s_per_step"])}


def main():
    args = parse_arguments()
    check_programs(args)
    if args.vllm and not os.access(args.vllm_python, os.X_OK):
        raise SystemExit(
            f"run_vs_peers: no Python at {args.vllm_python}: `make bench-peers` creates .venv-vllm; "
            "--no-vllm leaves that column out"
        )
    jobs = [(case, dtype) for case in args.generate for dtype in args.dtypes]
    jobs += [("train", dtype) for dtype in args.dtypes if args.train]
    runs = {job: [] for job in jobs}
    with tempfile.TemporaryDirectory(prefix="run_vs_peers_") as folder:
        bench = Bench(args, Path(folder))
        for number in range(1, args.rounds + 1):
            for job, results in runs.items():
                case, dtype = job
                results.append(bench.train(dtype) if case == "train" else bench.generate(case, dtype))
                seconds = ", ".join(f"{side} {s:.2f} s" for side, s in results[-1].items() if side in SIDES)
                say(f"round {number}/{args.rounds}  {case} {dtype}: {seconds}")
    lines = [
        ["prompt/new or job", "dtype", "Bough, s", *(f"{peer}/Bough" for peer in SIDES[1:]), "of the bound"]
    ]
    for (case, dtype), results in runs.items():
        medians = {key: statistics.median(result[key] for result in results) for key in results[0]}
        ours = medians["Bough"]
        ratios = [f"{medians[peer] / ours:.1f}" if peer in medians else "" for peer in SIDES[1:]]
        part = f"{medians['of the bound']:.0%}" if "of the bound" in medians else ""
        lines.append([case, dtype, f"{ours:.2f}", *ratios, part])
    print("medians; above 1: Bough is faster. `train`: a GRPO step")
    print(aligned(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Times steps of TRL's GRPOTrainer and prints one line of JSON.

A step has 16 prompts x 8 samples of two-digit sums, tokenized by characters, without a KL term. transformers
generates. bf16 is the trainer's mixed precision. The first step is a warm-up and is not reported.
"""

import argparse
import json
import random
import sys
import tempfile
import time

import torch
from datasets import Dataset
from peer_step import SHAPES, make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SAMPLES = 8
PER_STEP = 16 * SAMPLES
CHARACTERS = "0123456789+-*= ()?.abcdefghijklmnopqrstuvwxyz\n"


def make_tokenizer():
    vocab = {"<pad>": 0, "<eos>": 1, **{character: i + 2 for i, character in enumerate(CHARACTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_problems(shots):
    """Sums, each preceded by the same `shots` worked examples."""
    example = random.Random(1)
    pairs = [(example.randrange(10, 99), example.randrange(10, 99)) for _ in range(shots)]
    examples = "".join(f"{a}+{b}={a + b}. " for a, b in pairs)
    rng = random.Random(0)
    sums = [f"{rng.randrange(10, 99)}+{rng.randrange(10, 99)}=" for _ in range(1024)]
    return Dataset.from_list([{"prompt": examples + problem} for problem in sums])


def reward(completions, prompts, **_):
    """An arbitrary reward that differs within a group. The timing does not depend on its values."""
    return [float(len(completion) % 7) for completion in completions]


class StepClock(TrainerCallback):
    def __init__(self):
        self.stamps = []

    def on_step_end(self, *_, **__):
        self.stamps.append(time.perf_counter())

    def seconds(self):
        return [later - earlier for earlier, later in zip(self.stamps, self.stamps[1:], strict=False)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("precision", choices=["fp32", "bf16"])
    parser.add_argument("--model", choices=SHAPES, default="small", help="shape of the model (small)")
    parser.add_argument("--new", type=int, default=64, help="most tokens of a sample (64)")
    parser.add_argument("--steps", type=int, default=4, help="steps, the first included (4)")
    parser.add_argument("--shots", type=int, default=0, help="worked examples before each problem (0)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _, model = make_model(args.model, torch.float32, vocab=4096)
    clock = StepClock()
    with tempfile.TemporaryDirectory(prefix="peer_trl_") as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=PER_STEP,
            num_generations=SAMPLES,
            max_completion_length=args.new,
            max_steps=args.steps,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            gradient_checkpointing=False,
            bf16=args.precision == "bf16",
            beta=0.0,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=make_problems(args.shots),
            processing_class=make_tokenizer(),
            callbacks=[clock],
        )
        trainer.train()
    report = {
        "peer": "trl",
        "s_per_step": [round(seconds, 2) for seconds in clock.seconds()],
        "samples_per_step": PER_STEP,
        "new_tokens": args.new,
        "mode": args.precision,
        "shots": args.shots,
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

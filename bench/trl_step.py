#!/usr/bin/env python3
"""Times one training step of TRL's GRPOTrainer and of bough.trl.TreeGRPOTrainer, on the same completions.

A step is log-probabilities, loss, backward and optimizer. Nothing is generated: both replay random
completions. The model has the shape of SmolLM2-135M with fewer layers and random weights. The runs alternate;
the last line is a JSON object with the medians, W (the FLOPs of the flat batch / those of the tree) and the
speed-up.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from bough.trl import TreeGRPOTrainer
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

VOCABULARY = 49152


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument(
        "--response", type=int, default=40, help="most tokens of a response; the least: a quarter"
    )
    parser.add_argument("--samples", type=int, default=16, help="responses to a prompt")
    parser.add_argument("--prompts", type=int, default=1, help="prompts of a batch")
    parser.add_argument(
        "--steps", type=int, default=4, help="counted steps of each trainer, after one that is not"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser.parse_args()


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_trainer(kind: type, folder: str, arguments: argparse.Namespace, stamps: list[float]) -> GRPOTrainer:
    draw = random.Random(0)
    prompts = [
        " ".join(f"w{draw.randrange(2, VOCABULARY)}" for _ in range(arguments.prompt)) for _ in range(64)
    ]

    def completions(prompts: list[str], trainer: GRPOTrainer) -> dict:
        lengths = [draw.randint(arguments.response // 4, arguments.response - 1) for _ in prompts]
        ids = [[draw.randrange(2, VOCABULARY) for _ in range(length)] + [1] for length in lengths]
        return {
            "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": ids,
            "logprobs": [[-5.0] * len(each) for each in ids],
        }

    class Stamps(TrainerCallback):
        def on_step_end(self, *_args, **_kwargs):
            stamps.append(time.perf_counter())

    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=arguments.prompts * arguments.samples,
        num_generations=arguments.samples,
        max_completion_length=arguments.response,
        max_steps=arguments.steps + 1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=arguments.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    return kind(
        model=LlamaForCausalLM(shape).to(getattr(torch, arguments.dtype)),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=make_tokenizer(),
        rollout_func=completions,
        callbacks=[Stamps()],
    )


def main() -> None:
    warnings.simplefilter("ignore")
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    seconds: dict[str, list[float]] = {"trl": [], "bough": []}
    ratio = 0.0
    for name, kind in (("bough", TreeGRPOTrainer), ("trl", GRPOTrainer), ("bough", TreeGRPOTrainer)):
        stamps: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(kind, folder, arguments, stamps)
            trainer.train()
        seconds[name] += [end - begin for begin, end in zip(stamps, stamps[1:], strict=False)]
        if name == "bough":
            [engine] = trainer._engines.values()
            ratio = engine.last_plan["work_ratio"]
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    speedup = medians["trl"] / medians["bough"]
    print(
        f"TRL {medians['trl']:.2f} s, Bough {medians['bough']:.2f} s a step: {speedup:.1f} times as fast, W "
        f"{ratio:.1f}"
    )
    print(json.dumps({**medians, "speedup": speedup, "work_ratio": ratio, "share_of_w": speedup / ratio}))


if __name__ == "__main__":
    main()

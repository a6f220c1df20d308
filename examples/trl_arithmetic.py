"""TRL's GRPO over prefix trees: SmolLM2-135M-Instruct learns sums of reasoning-gym.

  make demo-real                      # once: downloads the model and writes the problems
  pip install 'bough[trl]' reasoning-gym
  python examples/trl_arithmetic.py --model runs/demo-real/model --data runs/demo-real

All that differs from a script for TRL is the class: bough.trl.TreeGRPOTrainer for trl.GRPOTrainer (--plain).
Prompts have eight worked examples, which all problems share. TRL's own generation takes most of the time. The
last line is the mean reward of the first and the last five steps.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from bough.trl import TreeGRPOTrainer
from datasets import Dataset
from reasoning_gym_task import score
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def with_examples(problem: dict, examples: list[dict]) -> dict:
    """The problem after worked examples, as text. The model answers after "A:"."""
    shown = "".join(f"Q: {each['question']}\nA: {each['answer']}\n\n" for each in examples)
    metadata = json.dumps(problem["metadata"])  # a column of one type
    return {
        "prompt": f"{shown}Q: {problem['question']}\nA:",
        "question": problem["question"],
        "answer": str(problem["answer"]),
        "metadata": metadata,
    }


def reward(completions, question, answer, metadata, **_):
    rows = zip(completions, question, answer, metadata, strict=True)
    return [score(text.split("\n")[0], q, a, json.loads(m)) for text, q, a, m in rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory of SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and examples.jsonl")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", default="runs/trl-arithmetic")
    parser.add_argument("--plain", action="store_true", help="TRL's own trainer, to compare")
    arguments = parser.parse_args()
    examples = read(arguments.data / "examples.jsonl")[:8]
    problems = [with_examples(each, examples) for each in read(arguments.data / "train.jsonl")]
    config = GRPOConfig(
        output_dir=arguments.out,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=8,
        learning_rate=1e-5,
        beta=0.0,
        max_steps=arguments.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = (GRPOTrainer if arguments.plain else TreeGRPOTrainer)(
        model=arguments.model,
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(problems),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    first, last = statistics.mean(rewards[:5]), statistics.mean(rewards[-5:])
    print(f"mean reward: {first:.3f} at the start, {last:.3f} at the end")


if __name__ == "__main__":
    main()

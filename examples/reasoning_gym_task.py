"""Any task of reasoning-gym as problems and reward of a run. `make demo-real` trains on such a task.

  python examples/reasoning_gym_task.py chain_sum --out DIR min_terms=2 max_terms=2 max_digits=2
  bough train configs/chain_sum.yaml reward=examples/reasoning_gym_task.py:score

The first command writes DIR/train.jsonl, DIR/test.jsonl and DIR/examples.jsonl (worked examples for the
prompt). No question is in two files. key=value are the task's own settings. `score` is the task's own
verifier: 1 for the right answer; some tasks give a fraction for an answer that is almost right.

The same lines are problems of an environment, a conversation in which the model may correct a wrong answer:

  bough train ... environment='{type: python, path: examples/reasoning_gym_task.py:ReasoningGym}'
"""

import argparse
import functools
import json
import sys
from pathlib import Path

import reasoning_gym

SEEDS = {"test": 1_000_001, "examples": 2_000_001, "train": 1}  # the files are generated in this order


@functools.cache
def verifier(task):
    return reasoning_gym.get_score_answer_fn(task)


def score(completion, question, answer, metadata, **fields):
    """Returns the reward of one completion, from 0 to 1. The arguments are fields of the problem's line."""
    entry = {"question": question, "answer": answer, "metadata": metadata}
    return float(verifier(metadata["source_dataset"])(completion.strip(), entry))


class ReasoningGym:
    """A turn is an answer. The model may correct a wrong answer. The verifier scores the last answer."""

    ATTEMPTS = 3

    def reset(self, problem, seed):
        self.problem, self.attempts = problem, 0
        return {}  # the conversation begins with the problem's own question

    def step(self, action):
        self.attempts += 1
        reward = score(completion=action["content"], **{**self.problem, "prompt": ""})
        if reward == 1.0 or self.attempts == self.ATTEMPTS:
            return {"reward": reward, "rewards": {"attempts": self.attempts}, "done": True}
        return {"messages": "That is not right. Look at it again, then give your answer."}


def draw(task, settings, count, seed, seen):
    """Returns `count` entries whose questions are not in `seen`, or fewer if the task has no more."""
    entries = []
    for entry in reasoning_gym.create_dataset(task, size=8 * count + 100, seed=seed, **settings):
        if len(entries) == count:
            break
        if entry["question"] not in seen:
            seen.add(entry["question"])
            entries.append(entry)
    return entries


def parse_settings(words):
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise SystemExit(f"got {word!r}; expected key=value, a setting of the task")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return settings


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", help="its name in reasoning-gym, such as chain_sum")
    parser.add_argument("settings", nargs="*", help="key=value of the task")
    parser.add_argument("--out", type=Path, required=True, help="folder for the three files")
    parser.add_argument("--train", type=int, default=5000, help="problems to train on (5000)")
    parser.add_argument("--test", type=int, default=200, help="held-out problems (200)")
    parser.add_argument("--examples", type=int, default=16, help="worked examples (16)")
    args = parser.parse_intermixed_args()
    settings = parse_settings(args.settings)
    args.out.mkdir(parents=True, exist_ok=True)
    seen = set()
    for name, seed in SEEDS.items():
        wanted = getattr(args, name)
        entries = draw(args.task, settings, wanted, seed, seen)
        if not entries and wanted:
            raise SystemExit(
                f"{args.task}: no question is left for {name}: ask for fewer, or for a larger task"
            )
        lines = [
            json.dumps(
                {"id": f"{name}-{number}"} | {key: entry[key] for key in ("question", "answer", "metadata")}
            )
            for number, entry in enumerate(entries)
        ]
        file = args.out / f"{name}.jsonl"
        partial = file.with_suffix(".partial")
        partial.write_text("\n".join(lines) + "\n")
        partial.rename(file)
        print(f"{file}: {len(entries)} problems", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

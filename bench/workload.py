"""Writes synthetic rollout sets of a chosen tree shape, one sequence per line (docs/formats.md).

Shapes:
  group         prompts with n samples each
  agentic       conversations that fork at the ends of turns; one sequence per turn, trained on its own prefix
  agentic_leaf  the same conversations; one sequence per conversation
  flat          sequences that share nothing

Tokens are random. Options and seed determine every byte, so another machine can reproduce a set.

    python bench/workload.py --shape group --n 8 --plen 512 --rlen 128 --prompts 2 --out set.jsonl
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

SHAPES = ["group", "agentic", "agentic_leaf", "flat"]
FIRST_TOKEN = 5  # ids below are special in most tokenizers
FORK = 0.35  # with c conversations, the next one starts at the prompt with probability FORK / (1 + c)
SAMPLING_LOG_PROB = -8.0  # the recorded sampling log-probability of each trained token


@dataclass(frozen=True)
class Workload:
    """The shape of a set. Lengths are in tokens; for sampled lengths the value is the mean."""

    shape: str
    prompts: int = 1
    n: int = 8  # samples or conversations per prompt
    plen: int = 256  # length of a prompt
    rlen: int = 128  # mean length of a sample or a turn
    turns: int = 8  # per conversation
    vocab: int = 4096


# The sets of the tables in README.md and docs/performance.md.
SETS = {
    "group": Workload("group", n=8, plen=512, rlen=128, prompts=2),
    "agentic": Workload("agentic", n=8, plen=512, turns=8, rlen=96),
    "agentic_leaf": Workload("agentic_leaf", n=16, plen=768, turns=12, rlen=64),
    "flat": Workload("flat", n=8, plen=128, rlen=256),
}
# The same shapes at sizes that take seconds, for smoke tests.
QUICK_SETS = {
    "group": Workload("group", n=4, plen=48, rlen=16, prompts=2),
    "agentic": Workload("agentic", n=3, plen=48, turns=3, rlen=16),
    "agentic_leaf": Workload("agentic_leaf", n=4, plen=48, turns=3, rlen=16),
    "flat": Workload("flat", n=3, plen=24, rlen=32),
}


class Sequence(NamedTuple):
    group: int
    tokens: list[int]
    untrained: int  # number of tokens before the first trained token


def draw_tokens(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, vocab) for _ in range(count)]


def draw_length(rng: random.Random, mean: int, spread: float, least: int) -> int:
    return max(least, int(rng.gauss(mean, spread)))


def make_groups(rng: random.Random, workload: Workload) -> list[Sequence]:
    sequences = []
    for group in range(workload.prompts):
        prompt = draw_tokens(rng, workload.plen, workload.vocab)
        for _ in range(workload.n):
            length = draw_length(rng, workload.rlen, workload.rlen / 4, least=4)
            sample = draw_tokens(rng, length, workload.vocab)
            sequences.append(Sequence(group, prompt + sample, len(prompt)))
    return sequences


def make_conversations(rng: random.Random, workload: Workload, leaf_only: bool) -> list[Sequence]:
    """A new conversation starts at the prompt or continues the first turns of an existing conversation."""
    sequences = []
    for group in range(workload.prompts):
        prompt = draw_tokens(rng, workload.plen, workload.vocab)
        conversations: list[list[list[int]]] = []
        for _ in range(workload.n):
            turns: list[list[int]] = []
            if conversations and rng.random() < 1 - FORK / (1 + len(conversations)):
                forked = rng.choice(conversations)
                turns = forked[: rng.randrange(0, len(forked))]
            while len(turns) < workload.turns:
                length = draw_length(rng, workload.rlen, workload.rlen / 3, least=8)
                turns.append(draw_tokens(rng, length, workload.vocab))
            conversations.append(turns)
            tokens = prompt
            for turn in turns:
                before, tokens = tokens, tokens + turn
                if not leaf_only:
                    sequences.append(Sequence(group, tokens, len(before)))
            if leaf_only:
                sequences.append(Sequence(group, tokens, len(prompt)))
    return sequences


def make_sequences(rng: random.Random, workload: Workload) -> list[Sequence]:
    if workload.shape == "group":
        return make_groups(rng, workload)
    if workload.shape == "flat":  # as many prompts as samples, one sample each
        return make_groups(rng, replace(workload, prompts=workload.prompts * workload.n, n=1))
    return make_conversations(rng, workload, workload.shape == "agentic_leaf")


def count_tree_tokens(sequences: list[Sequence]) -> int:
    """Nodes of the prefix tree. In sorted order, a sequence adds tokens not shared with the one before."""
    count, previous = 0, []
    for tokens in sorted(sequence.tokens for sequence in sequences):
        shared = 0
        for ours, theirs in zip(tokens, previous, strict=False):
            if ours != theirs:
                break
            shared += 1
        count += len(tokens) - shared
        previous = tokens
    return count


def write_set(workload: Workload, path: Path, seed: int = 0) -> dict:
    """Writes the set and returns its statistics. Each sequence has a random advantage from [-1, 1)."""
    rng = random.Random(seed)
    sequences = make_sequences(rng, workload)
    with open(path, "w", encoding="utf-8") as file:
        for group, tokens, untrained in sequences:
            trained = len(tokens) - untrained
            line = {
                "group": str(group),
                "input_ids": tokens,
                "loss_mask": [0] * untrained + [1] * trained,
                "advantage": rng.random() * 2 - 1,
                "logprobs": [0.0] * untrained + [SAMPLING_LOG_PROB] * trained,
            }
            file.write(json.dumps(line) + "\n")
    tokens = sum(len(sequence.tokens) for sequence in sequences)
    tree_tokens = count_tree_tokens(sequences)
    return {
        "sequences": len(sequences),
        "tokens": tokens,
        "tree_tokens": tree_tokens,
        "C": tokens / tree_tokens,
        "longest": max(len(sequence.tokens) for sequence in sequences),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--n", type=int, default=8, help="samples or conversations a prompt (8)")
    parser.add_argument("--plen", type=int, default=256, help="tokens of a prompt (256)")
    parser.add_argument("--rlen", type=int, default=128, help="mean tokens of a sample or a turn (128)")
    parser.add_argument("--turns", type=int, default=8, help="turns of a conversation (8)")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = vars(parser.parse_args())
    seed, out = options.pop("seed"), options.pop("out")
    print(json.dumps(write_set(Workload(**options), out, seed)), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

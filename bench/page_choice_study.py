#!/usr/bin/env python3
"""Measures which blocks of keys recall most attention, with real queries and keys of a model.

Block top-k keeps the blocks with the highest scores. Exact top-k keeps the single keys with the highest
scores of each query head. The recall of block top-k is

    attention mass of the keys that block top-k keeps / mass of as many keys chosen by exact top-k

as a ratio of sums over texts, sampled queries, query heads and layers. Both sides keep the same number of
keys for each query. The masses are those of dense attention. Queries and keys are those after rotation.

Scores of a block for a query q; m, lo, hi and s are the mean, smallest, largest and standard deviation of
each element over the block's keys, d is the head size:
  mean       q . m
  minmax     sum of max(q lo, q hi), as in Quest
  deviation  q . m + |q| . s
  gaussian   q . m / sqrt(d) + |q|^2 . s^2 / (2 d), the logarithm of the block's mean weight if the keys of
             a block were independent Gaussians in each element
  oracle     the block's mass itself: the best choice of whole blocks. It needs all keys, so it saves
             nothing

Query: `group` takes the mean of the queries of the heads that share a key/value head (oracle: the mean of
their masses), so these heads keep the same blocks. With `head` each query head keeps blocks of its own.

Always kept: ceil(sink / block) first blocks and max(1, ceil(recent / block)) last blocks, the query's own
included. They count against the budget, which is rounded down to whole blocks. The row is empty if the
budget leaves no block to choose.

Texts: either --rollouts, a file of `bough rollout` whose responses have the queries, or the first 8,192
tokens of 20 texts of the Python that runs this script: ten parts of pydoc_data.topics (English reference)
and the ten largest modules of the standard library (source code). Their queries are in the second half of
each text.
"""

import json
import sys
import sysconfig
import time
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from command_line import parser_of

BLOCKS = (4, 8, 16, 32, 64)
SUMMARIES = ("mean", "minmax", "deviation", "gaussian", "oracle")
QUERIES = ("group", "head")


def parse_arguments():
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face directory")
    add("--rollouts", type=Path, help="rollout file with the texts (default: 20 texts of Python)")
    add("--tokens", type=int, default=8192, help="tokens of a text of Python")
    add("--queries", type=int, default=64, help="sampled queries of a text, evenly spaced")
    add("--budgets", type=int, nargs="+", required=True, help="kept tokens")
    add("--sink", type=int, default=16)
    add("--recent", type=int, default=32)
    add("--layers", type=int, nargs="+", help="layers to measure (default: all)")
    add("--dense-layers", type=int, default=2, help="first layers, left out of all means over layers")
    add("--out", type=Path, required=True, help="file of all recalls, as JSON")
    return parser.parse_args()


def texts_of_python(model, num_tokens):
    """20 lists of token ids."""
    from pydoc_data import topics

    tokenizer = AutoTokenizer.from_pretrained(model)
    prose = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    size = len(prose) // 10
    texts = [prose[part * size : (part + 1) * size] for part in range(10)]
    modules = sorted(
        Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: -path.stat().st_size
    )
    texts += [path.read_text(encoding="utf-8") for path in modules[:10]]
    ids = [tokenizer(text)["input_ids"][:num_tokens] for text in texts]
    if min(map(len, ids)) < num_tokens:
        raise SystemExit(f"a text has {min(map(len, ids))} tokens; expected at least --tokens {num_tokens}")
    return ids


def read_texts(args):
    """Tuples (token ids, position of the first query)."""
    if args.rollouts is None:
        return [(ids, args.tokens // 2) for ids in texts_of_python(args.model, args.tokens)]
    records = [json.loads(line) for line in args.rollouts.read_text().splitlines()]
    # A query before the largest budget would keep everything.
    return [(record["input_ids"], max(record["loss_mask"].index(1), max(args.budgets))) for record in records]


class Recorder:
    """Keeps the sampled queries and all keys of each layer in one forward pass."""

    def __init__(self):
        AttentionInterface.register("recorded", self.attend)
        self.positions = None
        self.layers = []

    def attend(self, module, query, key, value, mask, **options):
        self.layers.append((query[0][:, self.positions].clone(), key[0].clone()))
        return sdpa_attention_forward(module, query, key, value, mask, **options)


def block_scores(q_GMQH, k_GTH, mass_GMQT, block):
    """Scores of blocks by (summary, query), [G, 1 or M, Q, B]. Q: sampled queries, M: heads of a group."""
    G, T, H = k_GTH.shape
    B = T // block
    keys = k_GTH[:, : B * block].reshape(G, 1, B, block, H)
    mean, lo, hi = keys.mean(3), keys.amin(3), keys.amax(3)
    deviation = keys.std(3, correction=0)
    mass = mass_GMQT[..., : B * block].unflatten(-1, (B, block)).sum(-1)
    scores = {}
    for query in QUERIES:
        q = q_GMQH.mean(1, keepdim=True) if query == "group" else q_GMQH
        score = q @ mean.mT
        scores["mean", query] = score
        scores["minmax", query] = q.clamp(min=0) @ hi.mT + q.clamp(max=0) @ lo.mT
        scores["deviation", query] = score + q.abs() @ deviation.mT
        scores["gaussian", query] = score / H**0.5 + q.square() @ deviation.square().mT / (2 * H)
        scores["oracle", query] = mass.mean(1, keepdim=True) if query == "group" else mass
    return scores


def recalled(scores_GMQB, mass_GMQB, own_Q, counts, sink, recent):
    """Masses of the kept blocks, [G, M, Q] for each number of kept blocks. own_Q: the query's own block."""
    index = torch.arange(scores_GMQB.shape[-1])
    kept = (index < sink) | ((index > own_Q[:, None] - recent) & (index <= own_Q[:, None]))
    scores = scores_GMQB.masked_fill(kept, float("inf")).masked_fill(index > own_Q[:, None], -float("inf"))
    best = scores.topk(max(counts), dim=-1).indices
    masses = mass_GMQB.gather(-1, best.expand(*mass_GMQB.shape[:3], -1)).cumsum(-1)
    return [masses[..., count - 1] for count in counts]


def measure_layer(q_NQH, k_GTH, positions, args, add):
    """Calls add(name, mass of block top-k, mass of exact top-k) for each combination."""
    G, T, H = k_GTH.shape
    q_GMQH = q_NQH.unflatten(0, (G, -1))
    future = torch.arange(T) > positions[:, None]
    mass_GMQT = (q_GMQH @ k_GTH[:, None].mT / H**0.5).masked_fill(future, -float("inf")).softmax(-1)
    largest = mass_GMQT.topk(min(T, max(args.budgets)), dim=-1).values.cumsum(-1)
    for block in BLOCKS:
        # Padding with keys of mass 0 gives the query's own block, which may be incomplete, a row of its own.
        # Its scores do not matter, because the block is always kept.
        padding = -T % block
        padded_k = torch.nn.functional.pad(k_GTH, (0, 0, 0, padding))
        padded_mass = torch.nn.functional.pad(mass_GMQT, (0, padding))
        mass_GMQB = padded_mass.unflatten(-1, (-1, block)).sum(-1)
        own_Q = positions // block
        rules = {"": (-(-args.sink // block), max(1, -(-args.recent // block))), "own block": (0, 1)}
        for (summary, query), scores in block_scores(q_GMQH, padded_k, padded_mass, block).items():
            for rule, (sink, recent) in rules.items():
                budgets = [budget for budget in args.budgets if budget // block > sink + recent]
                if not budgets or (rule and query == "head"):
                    continue
                counts = [budget // block for budget in budgets]
                masses = recalled(scores, mass_GMQB, own_Q, counts, sink, recent)
                for budget, count, mass in zip(budgets, counts, masses, strict=True):
                    last_key = (count - 1) * block + positions % block  # [Q]
                    exact = largest.gather(-1, last_key[:, None].expand(*largest.shape[:3], 1))
                    add(
                        (block, summary, query, rule, budget),
                        mass.sum().item(),
                        exact.sum().item(),
                        mass.numel(),
                    )


def study(args):
    """Per layer and combination: [mass of block top-k, mass of exact top-k, number of queries]."""
    recorder = Recorder()
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="recorded"
    )
    sums = {}
    texts = read_texts(args)
    begin = time.monotonic()
    for number, (ids, first) in enumerate(texts, start=1):
        recorder.positions = torch.linspace(first, len(ids) - 1, args.queries).long()
        recorder.layers.clear()
        model.model(torch.tensor([ids]), use_cache=False)
        for layer in args.layers or range(len(recorder.layers)):
            queries, keys = recorder.layers[layer]

            def add(name, *values, layer=layer):
                total = sums.setdefault((layer, *name), [0.0, 0.0, 0])
                for i, value in enumerate(values):
                    total[i] += value

            measure_layer(queries, keys, recorder.positions, args, add)
        write(sums, number, args.out)
        print(f"text {number} of {len(texts)}, {time.monotonic() - begin:.0f} s", flush=True)
    return sums


def write(sums, num_texts, path):
    names = ["layer", "block", "summary", "query", "rule", "budget", "mass", "exact_mass", "queries"]
    rows = [[*key, *values] for key, values in sorted(sums.items())]
    path.write_text(json.dumps({"texts": num_texts, "columns": names, "rows": rows}) + "\n")


def over_layers(sums, name, layers):
    """(recall, mean mass of exact top-k) over the layers, or None if there is nothing to choose."""
    found = [sums[layer, *name] for layer in layers if (layer, *name) in sums]
    if not found:
        return None
    mass, exact, count = map(sum, zip(*found, strict=True))
    return mass / exact, exact / count


def print_tables(sums, args):
    last = max(layer for layer, *_ in sums)
    layers = range(args.dense_layers, last + 1)
    for budget in args.budgets:
        for rule, query in (("", "group"), ("", "head"), ("own block", "group")):
            print(f"\nbudget {budget}, query per {query}{', only the own block kept' if rule else ''}")
            print("| block | " + " | ".join(SUMMARIES) + " | exact mass |\n" + "|---" * 7 + "|")
            for block in BLOCKS:
                cells = [over_layers(sums, (block, name, query, rule, budget), layers) for name in SUMMARIES]
                if cells[0] is not None:
                    recalls = " | ".join(f"{cell[0]:.3f}" for cell in cells)
                    print(f"| {block} | {recalls} | {cells[0][1]:.3f} |")
    print(f"\nby layer: summary mean, query per group, budget {args.budgets[-1]}")
    for block in BLOCKS:
        cells = [
            over_layers(sums, (block, "mean", "group", "", args.budgets[-1]), [i]) for i in range(last + 1)
        ]
        print(block, " ".join("-" if cell is None else f"{cell[0]:.2f}" for cell in cells))


@torch.inference_mode()
def main():
    args = parse_arguments()
    sums = study(args)
    print_tables(sums, args)


if __name__ == "__main__":
    main()

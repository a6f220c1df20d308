"""Small programming problems with tests, for the reward `code` (docs/verifiers.md).

  python examples/code_problems.py --out DIR -n 2000
  bough train configs/areal_code.yaml train_dataset.path=DIR/train.jsonl

Writes DIR/train.jsonl and DIR/test.jsonl. A problem is a chain of one to three steps on a list of whole
numbers: "keep the even numbers, then multiply each number by 3, then return their sum". No chain is in both
files. Each problem has eight tests, `f([4, 7]) == 12`. `answer` is a program that passes them.
"""

import argparse
import itertools
import json
import random
from pathlib import Path

NUMBERS = range(2, 10)
# (text, Python expression of the list x)
STEPS = [
    ("keep the even numbers", "[v for v in x if v % 2 == 0]"),
    ("keep the odd numbers", "[v for v in x if v % 2 == 1]"),
    ("sort the numbers in ascending order", "sorted(x)"),
    ("reverse the list", "x[::-1]"),
    ("remove repeated numbers and keep the first of each", "list(dict.fromkeys(x))"),
    *[(f"multiply each number by {n}", f"[v * {n} for v in x]") for n in NUMBERS],
    *[(f"add {n} to each number", f"[v + {n} for v in x]") for n in NUMBERS],
    *[(f"keep the numbers greater than {n}", f"[v for v in x if v > {n}]") for n in NUMBERS],
    *[(f"drop the first {n} numbers", f"x[{n}:]") for n in (1, 2, 3)],
]
ENDS = [
    ("return the list", "x"),
    ("return the sum of the numbers", "sum(x)"),
    ("return how many numbers are left", "len(x)"),
    ("return the largest number, or 0 if there is none", "max(x, default=0)"),
]


def chains(most_steps):
    for length in range(1, most_steps + 1):
        yield from itertools.product(*[STEPS] * length, ENDS)


def program(chain):
    lines = [f"    x = {expression}" for _, expression in chain[:-1]]
    return "\n".join(["def f(x):", *lines, f"    return {chain[-1][1]}"])


def problem(chain, rng, number_of_tests=8):
    answer = program(chain)
    names = {}
    exec(answer, names)
    lists = [[rng.randrange(20) for _ in range(rng.randrange(8))] for _ in range(number_of_tests)]
    return {
        "question": "Write a Python function f(x). x is a list of whole numbers. First "
        + ", then ".join(text for text, _ in chain)
        + ".",
        "answer": answer,
        "test_list": [f"assert f({values}) == {names['f'](list(values))!r}" for values in lists],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("-n", type=int, default=2000, help="problems for training")
    parser.add_argument("--num-test", type=int, default=200)
    parser.add_argument("--most-steps", type=int, default=2, choices=[1, 2, 3])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    every = list(chains(args.most_steps))
    if args.n + args.num_test > len(every):
        parser.error(
            f"-n and --num-test: got {args.n + args.num_test} problems; expected at most {len(every)}"
        )
    chosen = rng.sample(every, args.n + args.num_test)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", chosen[: args.num_test]), ("train", chosen[args.num_test :])):
        lines = [json.dumps(problem(chain, rng)) + "\n" for chain in part]
        (args.out / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()

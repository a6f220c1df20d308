"""Writes tasks of tau2-bench as problems of Bough, one a line.

  python tau2_problems.py telecom --split train --out train.jsonl              # the agent works alone
  python tau2_problems.py retail --split test --user http://127.0.0.1:8000/v1 --out test.jsonl

The tasks come in the order of their hash, so -n takes a sample that depends on nothing else.
"""

import argparse
import json
import sys

import tau2_library
from tau2.agent.llm_agent import LLMSoloAgent


def problems(domain, split="", without=(), user="", skip=0, count=None, **spec):
    """Returns problems as Bough reads them. Solo mode leaves out tasks without a ticket."""
    tau2_library.check_domain(domain, solo=not user)
    ids = tau2_library.task_ids(domain, split, tuple(without))
    if not user:
        tasks = tau2_library.tasks(domain)
        ids = [i for i in ids if tasks[i].ticket is not None and LLMSoloAgent.check_valid_task(tasks[i])]
    ids = ids[skip:] if count is None else ids[skip : skip + count]
    user = {"user": user} if user else {}
    return [
        # The question is a placeholder: the environment makes the messages.
        {
            "id": f"{domain}/{i}",
            "question": i,
            "answer": "",
            "tau2": {"domain": domain, "task": i, **user, **spec},
        }
        for i in ids
    ]


def write_lines(path, lines):
    with open(path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("domain", choices=tau2_library.DOMAINS)
    parser.add_argument("--split", default="", help="train, test, base, ...: tau2's own; default: all tasks")
    parser.add_argument("--without", nargs="*", default=[], metavar="SPLIT", help="splits that are left out")
    parser.add_argument("--user", default="", help="base URL of the user's model, or scripted (telecom)")
    parser.add_argument("--user-model", default="user", help="the model's name at that URL")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first tasks")
    parser.add_argument("-n", type=int, help="how many (all)")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    spec = {"user_model": args.user_model} if args.user not in ("", "scripted") else {}
    try:
        lines = problems(args.domain, args.split, args.without, args.user, args.skip, args.n, **spec)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    write_lines(args.out, lines)
    print(f"{args.out}: {len(lines)} problems", file=sys.stderr)


if __name__ == "__main__":
    main()

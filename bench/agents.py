#!/usr/bin/env python3
"""Times conversations with slow tools, and compares the orders in which the engine admits prompts.

Conversations of a small model with random weights go on for --turns turns. After each turn a tool takes 0.1
to 2 s (log-uniform) and answers with --answer words. The tools are an HTTP environment in this process. All
conversations of a task begin with the same instructions and one of --tasks questions. The settings
`rollout.admission: first_come` and `longest_prefix` take turns for --rounds rounds. The script prints
medians:

  seconds     of all conversations
  busy        share of this time that the engine computes
  cached      prompt tokens that the engine found in its prefix cache / all prompt tokens
  preempted   prompt tokens that were computed again because memory had run out
"""

import asyncio
import json
import random
import statistics
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from command_line import add_bough, parser_of, run_bough  # noqa: E402

ORDERS = ["first_come", "longest_prefix"]
STOPS = "aeioustr"  # random bytes have one after 32 tokens in the mean: the end of a turn
WORDS = ["alpha", "beta", "report", "value", "table", "error", "found", "line", "status", "reply"]


def parse_arguments():
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_bough(parser)
    add("--out", type=Path, default=ROOT / "runs/agents")
    add("--conversations", type=int, default=500)
    add("--tasks", type=int, default=50, help="different questions")
    add("--turns", type=int, default=6)
    add("--new-tokens", type=int, default=512, help="most tokens of a turn; one of that length is the last")
    add("--answer", type=int, default=40, help="words of a tool's answer")
    add("--instructions", type=int, default=100, help="words before each question")
    add("--slots", type=int, nargs="+", default=[32, 128], help="samples that are generated at once")
    add("--kv-memory", nargs="+", default=["4GiB", "48MiB"], help="memory for keys and values")
    add("--rounds", type=int, default=3)
    add("--hidden-size", type=int, default=128)
    add("--layers", type=int, default=4)
    return parser.parse_args()


def words(rng, count):
    return " ".join(rng.choice(WORDS) for _ in range(count))


class Tools:
    """An HTTP environment (docs/add_an_environment.md). Each call has a connection of its own."""

    def __init__(self, args):
        self.args = args
        self.turns, self.calls = {}, 0
        self.ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True).start()
        self.ready.wait()

    async def serve(self):
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        self.ready.set()
        await server.serve_forever()

    async def answer(self, reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        except asyncio.IncompleteReadError:  # Bough tries whether the endpoint is there
            writer.close()
            return
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        request = json.loads(await reader.readexactly(length))
        reply = await self.reply(request)
        body = json.dumps(reply).encode()
        start = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(start.encode() + b"Connection: close\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    async def reply(self, request):
        episode = request.get("episode")
        if request["method"] == "reset":
            self.turns[episode] = 0
            return {"id": request["id"]}
        if request["method"] == "close":
            self.turns.pop(episode, None)
            return {}
        self.turns[episode] += 1
        turn = self.turns[episode]
        self.calls += 1
        rng = random.Random(self.calls)  # the n-th call takes as long in every run
        await asyncio.sleep(0.1 * 20 ** rng.random())
        done = turn == self.args.turns
        return {"id": request["id"], "messages": words(rng, self.args.answer), "reward": 1.0, "done": done}


def bough(args, *words):
    return run_bough(args.bough, words, args.out, OMP_WAIT_POLICY="passive")


def prepare(args):
    args.out.mkdir(parents=True, exist_ok=True)
    shape = ["--hidden-size", args.hidden_size, "--layers", args.layers, "--heads", 4, "--kv-heads", 2]
    bough(args, "init", "model", *shape, "--max-positions", 16384, "--force")
    rng = random.Random(1)
    instructions = words(rng, args.instructions)
    lines = [json.dumps({"question": f"{instructions} {words(rng, 20)}"}) + "\n" for _ in range(args.tasks)]
    (args.out / "problems.jsonl").write_text("".join(lines))


def run(args, tools, order, slots, memory):
    words = [
        "rollout",
        "--model",
        "model",
        "--prompts",
        "problems.jsonl",
        "--out",
        "rollouts.jsonl",
        "--json",
    ]
    words += ["--n-samples", args.conversations // args.tasks, "--max-new-tokens", args.new_tokens]
    words += [word for stop in STOPS for word in ("--stop", stop)]
    words += ["--max-concurrent", slots, "--kv-memory", memory, f"rollout.admission={order}"]
    environment = ["http", f"url=http://127.0.0.1:{tools.port}/", f"workers={args.conversations}"]
    environment += [f"max_turns={args.turns}", "max_context=16384"]
    tools.calls = 0
    result = json.loads(bough(args, *words, "--environment", *environment).splitlines()[-1])
    prompt = result["prefill_tokens"] + result["cached_tokens"]
    return {
        "seconds": result["seconds"],
        "busy": result["engine_seconds"] / result["seconds"],
        "cached": result["cached_tokens"] / prompt,
        "preempted": result["recomputed_tokens"],
    }


def main():
    args = parse_arguments()
    args.out = args.out.resolve()
    prepare(args)
    tools = Tools(args)
    print("slots  memory  order            seconds   busy  cached  preempted  first_come / longest_prefix")
    for slots in args.slots:
        for memory in args.kv_memory:
            rounds = [
                {order: run(args, tools, order, slots, memory) for order in ORDERS}
                for _ in range(args.rounds)
            ]
            ratios = [row[ORDERS[0]]["seconds"] / row[ORDERS[1]]["seconds"] for row in rounds]
            for order in ORDERS:
                median = {
                    key: statistics.median(row[order][key] for row in rounds) for key in rounds[0][order]
                }
                print(
                    f"{slots:<6} {memory:<7} {order:<15} {median['seconds']:>8.1f} {median['busy']:>6.0%}"
                    f" {median['cached']:>7.0%} {median['preempted']:>10,.0f}"
                    + (f"  {statistics.median(ratios):.3f}" if order == ORDERS[1] else ""),
                    flush=True,
                )


if __name__ == "__main__":
    main()

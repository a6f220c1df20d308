"""Plays conversations of tau2-bench with agents that need no model.

  python tau2_play.py traces --problems train.jsonl --slips 0.12 --out traces.jsonl
  python tau2_play.py success --problems test.jsonl --slips 0.12
  python tau2_play.py load telecom -n 300

`traces` writes demonstrations for `bough sft`, one turn a line. `success` says how many conversations reach
the reward. `load` reports memory and tau2's own seconds. The agent `expert` (telecom, alone or with the
scripted user) checks, fixes and is done. `gold` makes the calls of the task's reference and is done; it sees
nothing of the conversation.
"""

import argparse
import json
import os
import re
import resource
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tau2_library
from tau2_environment import Tau2Environment
from tau2_expert import Expert
from tau2_problems import problems, write_lines

MAX_TURNS = 60
# In the prompt of tau2's user: why it calls, and what it knows.
REASON = re.compile(r"Reason for call:(.*?)(?:Unknown info:|Task instructions:|</scenario>)", re.DOTALL)


class Gold:
    """Makes the reference calls of a task, tells the user what the reference tells, and is done. A served
    user (`user` is a URL) does the user's calls itself."""

    def __init__(self, task, user):
        criteria = task.evaluation_criteria
        mine = ("assistant",) if user not in ("", "scripted") else ("assistant", "user")
        self.turns = [(a.name, a.arguments) for a in criteria.actions or [] if a.requestor in mine]
        if user and criteria.communicate_info:
            self.turns.append(("", {"text": "Your answer: " + ", ".join(criteria.communicate_info)}))
        self.turns.append(("done", {}))

    def call(self):
        return self.turns.pop(0)

    def answered(self, name, arguments, answer):
        pass


def device_request(name, arguments):
    """The turn by which an agent asks the user for an action of the user's phone."""
    words = ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
    return f"Please do this on your phone: {name}({words})"


@dataclass
class Play:
    """One conversation, its messages in the format of OpenAI's API, and the CPU seconds that tau2 needed: its
    orchestrator, tools and evaluation, and the client of the user's model."""

    problem: dict
    agent: object
    environment: Tau2Environment = field(default_factory=Tau2Environment)
    messages: list = field(default_factory=list)
    tools: list = field(default_factory=list)
    opening: int = 0  # messages before the agent's first turn
    reward: float | None = None  # None: not over
    turns: int = 0
    reset_seconds: float = 0.0
    turn_seconds: float = 0.0
    last_seconds: float = 0.0  # of the last turn, with tau2's evaluation

    def open(self, seed=0):
        began = time.process_time()
        opened = self.environment.reset(self.problem, seed)
        self.reset_seconds = time.process_time() - began
        self.messages, self.tools = opened["messages"], opened["tools"]
        self.opening = len(self.messages)

    def turn(self):
        asked, arguments = self.agent.call()
        name, text = asked, ""
        if not name:
            text = arguments["text"]
        elif name not in {tool["function"]["name"] for tool in self.tools}:
            name, text = "", device_request(name, arguments)
        call = {"id": f"c{self.turns:05d}000", "name": name, "arguments": arguments}
        message = {"role": "assistant", "content": text}
        if name:
            function = {"name": name, "arguments": arguments}
            message["tool_calls"] = [{"id": call["id"], "type": "function", "function": function}]
        self.messages.append(message)
        began = time.process_time()
        answer = self.environment.step({"text": text, "content": text, "calls": [call] if name else []})
        seconds = time.process_time() - began
        self.turns += 1
        self.messages += answer.get("messages", [])
        if answer.get("done"):
            self.reward, self.last_seconds = answer["reward"], seconds
        elif self.turns == MAX_TURNS:
            self.environment.close()
            self.reward = 0.0
        else:
            self.turn_seconds += seconds
            self.agent.answered(asked, arguments, answer["messages"][-1]["content"])

    def lines(self):
        """An example for `bough sft` for each turn: it learns the last message."""
        ends = [i + 1 for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        return [{"messages": self.messages[:end], "tools": self.tools} for end in ends]


def make_play(problem, agent, slips=0.0, seed=0):
    spec = problem["tau2"]
    task, user = tau2_library.find_task(spec["domain"], spec["task"]), spec.get("user", "")
    if agent == "gold":
        return Play(problem, Gold(task, user))
    if spec["domain"] != "telecom" or user not in ("", "scripted"):
        raise SystemExit(
            "the expert plays telecom alone or with the scripted user (problems without a user, or "
            "--user scripted); use --agent gold"
        )
    return Play(problem, Expert(task.ticket, slips, seed))


def play(problem, agent, slips=0.0, seed=0):
    conversation = make_play(problem, agent, slips, seed)
    conversation.open()
    while conversation.reward is None:
        conversation.turn()
    return conversation


class ReplayedUser(BaseHTTPRequestHandler):
    """Answers requests of OpenAI's chat API as a user who says why it calls, and has nothing to add."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        begins = all(message["role"] != "assistant" for message in messages)  # the user's own turns
        reason = REASON.search(messages[0]["content"]) if begins else None
        words = " ".join(reason[1].replace("Known info:", "").split()) if reason else "Please go on."
        message = {"role": "assistant", "content": words}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "user", "object": "chat.completion", "created": 0, "model": "user", "usage": usage}
        body = json.dumps(answer | {"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def replayed_user():
    """The URL of a user's model."""
    with ThreadingHTTPServer(("127.0.0.1", 0), ReplayedUser) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def load(domain, count):
    """Holds `count` conversations at once, a turn of each in a round. Returns memory and seconds."""
    solo = domain in tau2_library.SOLO_DOMAINS
    with replayed_user() as url:
        lines = problems(domain, user="" if solo else url)
        before, began = resident_mib(), time.perf_counter()
        agent = "expert" if domain == "telecom" else "gold"
        plays = [make_play(lines[i % len(lines)], agent, slips=0.12, seed=i) for i in range(count)]
        for conversation in plays:
            conversation.open()
        opened = resident_mib()
        while running := [conversation for conversation in plays if conversation.reward is None]:
            for conversation in running:
                conversation.turn()
        wall = time.perf_counter() - began
    turns = sum(conversation.turns for conversation in plays)
    return {
        "domain": domain,
        "conversations": count,
        "agent": agent,
        "turns_mean": turns / count,
        "reward_mean": sum(conversation.reward for conversation in plays) / count,
        "mib_before": before,
        "mib_of_all_open": opened - before,
        "mib_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "cpu_ms_reset": 1000 * sum(p.reset_seconds for p in plays) / count,
        "cpu_ms_turn": 1000 * sum(p.turn_seconds for p in plays) / max(1, turns - count),
        "cpu_ms_last_turn": 1000 * sum(p.last_seconds for p in plays) / count,
        "wall_seconds": wall,
    }


def read_lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("traces", "success"):
        command = commands.add_parser(name)
        command.add_argument("--problems", required=True, help="file of tau2_problems.py")
        command.add_argument("--agent", choices=["expert", "gold"], default="expert")
        command.add_argument(
            "--slips", type=float, default=0.0, help="share of the expert's turns with a mistake"
        )
        command.add_argument("--samples", type=int, default=1, help="conversations of each problem")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument(
            "--out", required=name == "traces", help="file of conversations, one turn a line"
        )
    command = commands.add_parser("load")
    command.add_argument("domain", choices=tau2_library.DOMAINS)
    command.add_argument("-n", type=int, default=16, help="conversations at once")
    args = parser.parse_args()
    if args.command == "load":
        print(json.dumps(load(args.domain, args.n)))
        return
    plays, seed = [], args.seed
    for problem in read_lines(args.problems):
        for _ in range(args.samples):
            plays.append(play(problem, args.agent, args.slips, seed))
            seed += 1
    if args.out:
        write_lines(args.out, (line for conversation in plays for line in conversation.lines()))
    won = sum(conversation.reward > 0 for conversation in plays)
    turns = sum(conversation.turns for conversation in plays) / len(plays)
    print(f"{len(plays)} conversations, success {won / len(plays):.3f}, {turns:.1f} turns", file=sys.stderr)


if __name__ == "__main__":
    main()

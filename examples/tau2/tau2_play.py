"""Plays conversations of tau2-bench with agents that need no model.

  python tau2_play.py traces --problems train.jsonl --slips 0.12 --out traces.jsonl
  python tau2_play.py success --problems test.jsonl --slips 0.12
  python tau2_play.py choose --problems train.jsonl --out lists.json
  python tau2_play.py load telecom -n 300

`traces` writes demonstrations for `bough sft learned_messages=all`, one conversation a line. `success` says
how many conversations reach the reward. `load` reports memory and tau2's own seconds.
The agent `expert` (telecom, alone or with the scripted user) checks, fixes and is done. `gold` makes the
calls of the task's reference and is done; it sees nothing of the conversation.
`ticket` makes the calls of a list that depends on the ticket alone (tau2_ticket.py).
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
from pathlib import Path

import tau2_library
from tau2_environment import Tau2Environment
from tau2_expert import Expert
from tau2_problems import problems, write_lines
from tau2_server import Server
from tau2_ticket import Script, choose_all, kind_of
from tau2_tokenizer import END_OF_TURN, renderer

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

    def to_end(self):
        self.open()
        while self.reward is None:
            self.turn()
        return self

    def end(self):
        """The number of messages up to the agent's last turn."""
        return 1 + max(i for i, message in enumerate(self.messages) if message["role"] == "assistant")

    def example(self):
        """The conversation for `bough sft learned_messages=all`, which learns the agent's turns."""
        return {"messages": self.messages[: self.end()], "tools": self.tools}

    def whole(self, render):
        """The conversation as one example for `bough sft`, which learns turns and answers. The text is that
        of the model's chat template; `bough sft` adds the token that ends a turn."""
        begin = next(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        prompt = render(self.messages[:begin], self.tools, opens_turn=True)
        text = render(self.messages[: self.end()], self.tools)
        assert text.startswith(prompt), "the template renders an opened turn otherwise than a finished one"
        return {"prompt": prompt, "completion": text[len(prompt) :].rstrip("\n").removesuffix(END_OF_TURN)}


def ticket_of(problem):
    """The ticket of a problem of telecom that the agent solves alone."""
    spec = problem["tau2"]
    if spec["domain"] != "telecom" or spec.get("user"):
        raise SystemExit("the agent `ticket` plays telecom alone (problems without a user); use --agent gold")
    return tau2_library.find_task("telecom", spec["task"]).ticket


def make_play(problem, agent="expert", slips=0.0, seed=0, lists=None):
    """lists: those of `choose`, for the agent `ticket`. A ticket that had no task then has no calls."""
    spec = problem["tau2"]
    task, user = tau2_library.find_task(spec["domain"], spec["task"]), spec.get("user", "")
    if agent == "gold":
        return Play(problem, Gold(task, user))
    if agent == "ticket":
        return Play(problem, Script(lists.get(kind_of(ticket_of(problem)), [])))
    if spec["domain"] != "telecom" or user not in ("", "scripted"):
        raise SystemExit(
            "the expert plays telecom alone or with the scripted user (problems without a user, or "
            "--user scripted); use --agent gold"
        )
    return Play(problem, Expert(task.ticket, slips, seed))


def play(*arguments, **options):
    return make_play(*arguments, **options).to_end()


def choose(problems):
    """The lists of the agent `ticket`, chosen on problems."""
    return choose_all(problems, ticket_of, lambda problem, agent: Play(problem, agent).to_end().reward)


def user_answer(request):
    """Answers a request of OpenAI's chat API as a user who says why it calls, and has nothing to add."""
    messages = request["messages"]
    begins = all(message["role"] != "assistant" for message in messages)  # the user's own turns
    reason = REASON.search(messages[0]["content"]) if begins else None
    words = " ".join(reason[1].replace("Known info:", "").split()) if reason else "Please go on."
    message = {"role": "assistant", "content": words}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    answer = {"id": "user", "object": "chat.completion", "created": 0, "model": "user", "usage": usage}
    return answer | {"choices": [choice]}


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def replayed_user():
    """The URL of a user's model."""
    with Server(user_answer, "v1") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
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


def played(args, lists):
    """Plays the conversations of a file one after the other; none is kept, since each has a data base."""
    seed = args.seed
    for path in args.problems:
        for problem in read_lines(path):
            for _ in range(args.samples):
                yield path, play(problem, args.agent, args.slips, seed, lists)
                seed += 1


def counts_of(results, samples):
    """results: (reward, turns) of each conversation. Returns the success of each problem, and the mean of the
    calls."""
    rewards = [reward > 0 for reward, _ in results]
    groups = [rewards[i : i + samples] for i in range(0, len(rewards), samples)]
    calls = sum(turns for _, turns in results) / len(results)
    return {"success": [sum(group) / samples for group in groups], "calls": round(calls, 2)}


def run_agent(args):
    """`traces` and `success`."""
    if (args.agent == "ticket") != bool(args.lists):
        raise SystemExit("--agent ticket needs --lists, and no other agent reads them")
    lists = json.loads(Path(args.lists).read_text()) if args.lists else None
    results, render = {path: [] for path in args.problems}, renderer()
    with open(args.out or os.devnull, "w") as out:
        for path, conversation in played(args, lists):
            results[path].append((conversation.reward, conversation.turns))
            if args.out:
                line = conversation.whole(render) if args.whole else conversation.example()
                out.write(json.dumps(line) + "\n")
    for path, found in results.items():
        counts = counts_of(found, args.samples)
        success = sum(counts["success"]) / len(counts["success"])
        calls = counts["calls"]
        print(
            f"{path}: {len(found)} conversations, success {success:.3f}, {calls:.1f} turns", file=sys.stderr
        )
    if args.counts:
        write_lines(args.counts, [counts_of(found, args.samples) for found in results.values()])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("traces", "success"):
        command = commands.add_parser(name)
        add = command.add_argument
        add("--problems", required=True, nargs="+", help="files of tau2_problems.py")
        add("--agent", choices=["expert", "gold", "ticket"], default="expert")
        add("--lists", help="file of `choose`, for the agent ticket")
        add("--slips", type=float, default=0.0, help="share of the expert's turns with a mistake")
        add("--samples", type=int, default=1, help="conversations of each problem")
        add("--seed", type=int, default=0)
        add("--out", required=name == "traces", help="file of conversations, one a line")
        add(
            "--whole", action="store_true", help="--out has prompts and completions: answers are learned, too"
        )
        add("--counts", help="file of the success of each problem and of the calls, one line a file")
        command.set_defaults(run=run_agent)
    command = commands.add_parser("choose")
    command.add_argument("--problems", required=True, help="training tasks of telecom, without a user")
    command.add_argument("--out", required=True, help="file of the lists, for --lists")
    command.set_defaults(run=lambda args: write_lines(args.out, [choose(read_lines(args.problems))]))
    command = commands.add_parser("load")
    command.add_argument("domain", choices=tau2_library.DOMAINS)
    command.add_argument("-n", type=int, default=16, help="conversations at once")
    command.set_defaults(run=lambda args: print(json.dumps(load(args.domain, args.n))))
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()

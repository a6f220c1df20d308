"""Environments written for `verifiers` (0.1, from PyPI) as environments of Bough.

  python verifiers_environment.py ENVIRONMENT --out problems.jsonl key=value   # arguments of load_environment
  bough train ... train_dataset.path=problems.jsonl \\
    environment='{type: python, path: verifiers_environment.py:VerifiersEnvironment, python: .../bin/python}'

The environment runs its own rollout, and Bough is the model that it calls. Its tools, users and checks
between two requests work unchanged. The sum of its rewards is the conversation's reward; each reward is
recorded by name. Two limits apply: the environment requests one answer at a time, and it must not rewrite
messages that the model has seen.
"""

import argparse
import asyncio
import functools
import json
import queue
import sys
import threading
import time

import verifiers as vf
from openai.types.chat import ChatCompletion
from verifiers.clients import OpenAIChatCompletionsClient


@functools.cache
def load(name, arguments):
    return vf.load_environment(name, **json.loads(arguments))


@functools.cache
def event_loop():
    """The event loop has its own thread, since rollouts continue between calls."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class AsksBough(OpenAIChatCompletionsClient):
    """Passes each request to the environment's methods through a queue, and waits for the answer."""

    def __init__(self, questions):
        super().__init__(None)
        self.questions = questions

    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        reply = asyncio.get_running_loop().create_future()
        self.questions.put((json.loads(json.dumps(prompt, default=dict)), tools, reply))
        return completion(await reply)

    async def close(self):
        pass


def completion(action):
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
        }
        for call in action["calls"]
    ]
    # verifiers treats an empty turn as a fault of the model's server. The model wrote it, so send a space.
    content = action["content"] or (None if calls else " ")
    message = {"role": "assistant", "content": content, "tool_calls": calls or None}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
    answer = {"id": "bough", "object": "chat.completion", "created": int(time.time()), "model": "bough"}
    return ChatCompletion.model_validate(answer | {"choices": [choice]})


class VerifiersEnvironment:
    def reset(self, problem, seed):
        spec = problem["verifiers"]
        environment = load(spec["environment"], json.dumps(spec["arguments"]))
        self.questions, self.shown = queue.Queue(), []
        rollout = environment.run_rollout(spec["input"], AsksBough(self.questions), "bough", {})
        self.rollout = asyncio.run_coroutine_threadsafe(rollout, event_loop())
        self.rollout.add_done_callback(lambda _: self.questions.put(None))
        return self.next_question()

    def step(self, action):
        event_loop().call_soon_threadsafe(self.reply.set_result, action)
        return self.next_question()

    def close(self):
        if hasattr(self, "rollout"):
            self.rollout.cancel()

    def next_question(self):
        """Returns the new messages of the next request, or the end of the conversation."""
        question = self.questions.get()
        if question is None:
            output = self.rollout.result()
            if output.get("error"):
                raise RuntimeError(f"the rollout failed: {output['error']}")
            metrics = {
                name: value for name, value in (output.get("metrics") or {}).items() if value is not None
            }
            return {"reward": output["reward"], "rewards": metrics, "done": True}
        messages, tools, self.reply = question
        if not self.shown:
            self.shown = messages
            return {"messages": messages, "tools": tools or []}
        known = len(self.shown)
        if messages[:known] != self.shown or messages[known]["role"] != "assistant":
            raise NotImplementedError("the environment rewrites what it has shown to the model")
        self.shown = messages
        return {"messages": messages[known + 1 :]}


def parse_arguments(words):
    arguments = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise SystemExit(f"got {word!r}; expected key=value, an argument of load_environment")
        try:
            arguments[key] = json.loads(value)
        except json.JSONDecodeError:
            arguments[key] = value
    return arguments


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", help="as vf.load_environment knows it")
    parser.add_argument("arguments", nargs="*", help="key=value of load_environment")
    parser.add_argument("--out", required=True, help="file of problems")
    parser.add_argument("-n", type=int, default=-1, help="how many (all)")
    parser.add_argument("--eval", action="store_true", help="of its evaluation set")
    args = parser.parse_intermixed_args()
    arguments = parse_arguments(args.arguments)
    environment = load(args.environment, json.dumps(arguments))
    rows = environment.get_eval_dataset(args.n) if args.eval else environment.get_dataset(args.n)
    with open(args.out, "w") as file:
        for number, row in enumerate(rows):
            row = {"example_id": number, **row}
            spec = {"environment": args.environment, "arguments": arguments, "input": row}
            name = f"{args.environment}-{number}"  # a placeholder; the environment has the real question
            line = {"id": name, "question": name, "answer": str(row.get("answer", ""))}
            file.write(json.dumps({**line, "verifiers": spec}, default=str) + "\n")
    print(f"{args.out}: {len(rows)} problems", file=sys.stderr)


if __name__ == "__main__":
    main()

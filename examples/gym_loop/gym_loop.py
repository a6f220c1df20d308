"""A world with reset() and step() as Gymnasium has them, played over HTTP by the model that
`bough train` trains.

    python gym_loop.py http://127.0.0.1:8765

The model walks on a line of five places and is to find the right end. Only the standard library is used: any
program that can send a request can do this. Ends when the run does.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Walk:
    """Left, right, and a reward at the right end."""

    def reset(self, seed: int) -> str:
        self.place, self.steps = 2, 0
        return "You are at 2 of 0 to 4. l or r?"

    def step(self, action: str) -> tuple[str, float, bool]:
        self.steps += 1
        self.place += {"l": -1, "r": 1}.get(action.strip()[:1], 0)
        reached = self.place == 4
        return (
            f"You are at {self.place}. l or r?",
            float(reached),
            reached or self.place == 0 or self.steps == 4,
        )


class Model:
    """The API, without a client."""

    def __init__(self, url: str, key: str = "none"):
        self.url, self.key = url, key

    def post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read())


def play(model: Model) -> None:
    """One episode; each step's reward is that of the answer that made it."""
    world = Walk()
    messages = [{"role": "user", "content": world.reset(seed=0)}]
    done = False
    while not done:
        answer = model.post("/v1/chat/completions", {"messages": messages})
        action = answer["choices"][0]["message"]["content"]
        observation, reward, done = world.step(action)
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
        model.post("/rl/set_reward", {"interaction_id": answer["id"], "reward": reward})


def loop(url: str) -> int:
    count = 0
    while True:
        try:
            session = Model(url, Model(url).post("/rl/start_session", {})["api_key"])
            play(session)
            session.post("/rl/end_session", {})
            count += 1
        except urllib.error.HTTPError as error:
            if error.code != 429:
                return count
            time.sleep(0.05)  # no group may begin before the next step
        except OSError:
            return count  # the run has ended


if __name__ == "__main__":
    with ThreadPoolExecutor(8) as pool:
        print(sum(pool.map(loop, [sys.argv[1]] * 8)), "episodes")

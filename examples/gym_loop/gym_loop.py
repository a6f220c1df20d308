"""A world with reset() and step(), as in Gymnasium. The model that `bough train` trains plays it over HTTP.

    python gym_loop.py http://127.0.0.1:8765

The model walks on a line of five places and must find the right end. The program uses only the standard
library, so any program that can send HTTP requests can do the same. The program ends when the run ends.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Walk:
    """The actions are left and right. The right end gives the reward."""

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
    """Calls the HTTP API without a client library."""

    def __init__(self, url: str, key: str = "none"):
        self.url, self.key = url, key

    def post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.loads(answer.read())


def play(model: Model) -> None:
    """Plays one episode. Each step's reward is given to the answer that caused the step."""
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
            time.sleep(0.05)  # 429: no group may start before the next step
        except OSError:
            return count  # the run has ended


if __name__ == "__main__":
    with ThreadPoolExecutor(8) as pool:
        print(sum(pool.map(loop, [sys.argv[1]] * 8)), "episodes")

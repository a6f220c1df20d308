"""An agent written with OpenAI's or Anthropic's client, trained by `bough train`. It knows only the URL of
the run. A user writes a function like play_openai(): one episode with the unmodified client.

    python agent.py http://127.0.0.1:8765 --client openai --workers 16

It ends when the run ends.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai

QUESTIONS = ["Say a letter.", "Another one."]
VOWELS = set("aeiou")


def score(letter: str) -> float:
    return float(letter.strip().lower() in VOWELS)


def play_openai(url: str, key: str, problem: dict[str, Any] | None) -> None:
    """Two turns. Each answer gets its own reward, by its id. The episode's reward is the sum."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        messages: list[Any] = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = client.chat.completions.create(model="any", messages=messages)
            text = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            reward = {"interaction_id": answer.id, "reward": score(text)}
            client.post("/rl/set_reward", body=reward, cast_to=object)


def play_anthropic(url: str, key: str, problem: dict[str, Any] | None) -> None:
    """The same episode. The reward is set once, at the end, for the last answer."""
    with anthropic.Anthropic(base_url=url, api_key=key) as client:
        messages: list[Any] = []
        total = 0.0
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = client.messages.create(model="any", max_tokens=16, messages=messages)
            text = "".join(block.text for block in answer.content if block.type == "text")
            messages.append({"role": "assistant", "content": text or " "})
            total += score(text)
        client.post("/rl/set_reward", body={"reward": total}, cast_to=object)


def episodes(url: str, key: str, play: Any) -> int:
    """Starts and plays sessions until the run ends. Returns the number of sessions."""
    count = 0
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as run:
        while True:
            try:
                started: Any = run.post("/rl/start_session", body={}, cast_to=object)
            except openai.RateLimitError:  # 429: no group may start before the next step
                time.sleep(0.05)
                continue
            except (openai.APIStatusError, openai.APIConnectionError):
                return count  # the run has ended
            try:
                play(url, started["api_key"], started.get("problem"))
                headers = {"Authorization": f"Bearer {started['api_key']}"}
                run.post("/rl/end_session", body={}, cast_to=object, options={"headers": headers})
                count += 1
            except (openai.APIError, anthropic.APIError) as error:
                print(f"an episode was given up: {error}")  # the session ends with its lease


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="what `bough train` printed")
    parser.add_argument("--client", choices=["openai", "anthropic"], default="openai")
    parser.add_argument("--workers", type=int, default=16, help="episodes at once")
    parser.add_argument("--key", default="none", help="the run's BOUGH_API_KEY, where it has one")
    options = parser.parse_args()
    play = play_openai if options.client == "openai" else play_anthropic
    with ThreadPoolExecutor(options.workers) as pool:
        done = list(pool.map(lambda _: episodes(options.url, options.key, play), range(options.workers)))
    print(f"{sum(done)} episodes")


if __name__ == "__main__":
    main()

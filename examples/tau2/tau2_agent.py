"""tau2's own agents, unchanged, as external agents that `bough train` trains. They know only the URL of the
run.

  bough train config.yaml model.path=MODEL train_dataset.path=train.jsonl serve.port=8765
  python tau2_agent.py http://127.0.0.1:8765 --workers 16

The user of a problem may be the model that is trained: `--user self`. Its answers are not trained on. The
program ends when the run ends.
"""

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import tau2_library  # first: it prepares the imports below
from tau2.agent.llm_agent import LLMAgent, LLMSoloAgent
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
from tau2.orchestrator.orchestrator import Orchestrator
from tau2_environment import MAX_STEPS, agent_tools
from tau2_users import make_user

MALFORMED = (  # the beginnings of what tau2 raises if the agent's turn has no call (solo mode) or is empty
    "LLMSoloAgent only supports tool calls.",
    "AssistantMessage must have either content or tool calls. Got AssistantMessage",
)


def post(url, key, **body):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


def episode(url, key, spec):
    """Holds one conversation. Returns tau2's reward, or None if the model's turn was malformed."""
    domain, solo = spec["domain"], not spec.get("user")
    task, environment = (
        tau2_library.find_task(domain, spec["task"]),
        tau2_library.make_environment(domain, solo),
    )
    if spec.get("user") == "self":
        spec = {**spec, "user": f"{url}/v1"}
    model = {"llm": "openai/bough", "llm_args": {"api_base": f"{url}/v1", "api_key": key, "num_retries": 0}}
    tools, policy = list(agent_tools(domain, solo)), environment.get_policy()
    orchestrator = Orchestrator(
        domain=domain,
        agent=LLMSoloAgent(tools, policy, task, **model) if solo else LLMAgent(tools, policy, **model),
        user=make_user(spec, environment, task),
        environment=environment,
        task=task,
        max_steps=spec.get("max_steps", MAX_STEPS),
        solo_mode=solo,
    )
    try:
        simulation = orchestrator.run()
    except ValueError as error:
        if str(error).startswith(MALFORMED):
            return None
        raise
    return evaluate_simulation(simulation, task, EvaluationType.ALL, solo, domain).reward


def play(url, key, user, counts):
    """Plays sessions until the run ends. A session whose conversation failed ends without a reward."""
    while True:
        try:
            session = post(f"{url}/rl/start_session", key)
        except HTTPError as error:
            if error.code != 429:  # 429: no group may start before the next step
                return
            time.sleep(0.05)
            continue
        except (URLError, ConnectionError):
            return  # the run has ended
        spec = session["problem"]["tau2"] | ({"user": user} if user else {})
        try:
            reward = episode(url, session["api_key"], spec)
            counts["malformed" if reward is None else "judged"] += 1
            parts = {"malformed": float(reward is None)}
            post(f"{url}/rl/set_reward", session["api_key"], reward=reward or 0.0, rewards=parts)
        except Exception:
            counts["failed"] += 1
            traceback.print_exc(limit=1)
        try:
            post(f"{url}/rl/end_session", session["api_key"])
        except (URLError, ConnectionError):
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="what `bough train` printed")
    parser.add_argument("--workers", type=int, default=16, help="conversations at once")
    parser.add_argument("--user", default="", help="instead of the problem's: a base URL, scripted, or self")
    parser.add_argument("--key", default="none", help="the run's BOUGH_API_KEY, where it has one")
    args = parser.parse_args()
    counts = Counter()
    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(lambda _: play(args.url, args.key, args.user, counts), range(args.workers)))
    print(json.dumps(counts), file=sys.stdout)


if __name__ == "__main__":
    main()

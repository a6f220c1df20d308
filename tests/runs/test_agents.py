"""External agents that are trained through base_url alone: the official clients, leases, and a resumed
run."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, in_chromium
from run_util import ENVIRONMENT, read_metrics, to_yaml
from test_ctl import wait_until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXAMPLE = EXAMPLES / "openai_agent/agent.py"
GYM_LOOP = EXAMPLES / "gym_loop/gym_loop.py"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Run:
    """`bough train` with agents, as a process. `url` is set once the server listens."""

    def __init__(self, bough, config: Path, *overrides: str):
        self.log = (bough.cwd / f"train-{time.monotonic_ns()}.log").open("w+")
        self.process = subprocess.Popen(
            [str(bough.program), "train", str(config), "--json", *overrides],
            cwd=bough.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        line = self.process.stdout.readline()
        assert line, self.text()
        self.url = json.loads(line)["url"]

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def ask(self, path: str, body: dict[str, Any], key: str = "none") -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def metrics(self) -> str:
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as answer:
            return answer.read().decode()

    def episode(self, task: str = "", rewards: bool = True) -> int:
        """Plays one episode. Returns the HTTP status of starting the session."""
        status, started = self.ask("/rl/start_session", {"task_id": task})
        if status != 200:
            return status
        key = started["api_key"]
        body = {"messages": [{"role": "user", "content": "Say a letter."}]}
        status, answer = self.ask("/v1/chat/completions", body, key)
        assert status == 200, answer
        text = answer["choices"][0]["message"]["content"]
        if rewards:
            assert self.ask("/rl/set_reward", {"reward": float(text in "aeiou")}, key)[0] == 200
        assert self.ask("/rl/end_session", {}, key)[0] == 200
        return 200

    def wait(self) -> dict[str, Any]:
        out, _ = self.process.communicate(timeout=240)
        assert self.process.returncode == 0, self.text()
        return json.loads(out.splitlines()[-1])


@contextlib.contextmanager
def running(bough, config: Path, *overrides: str) -> Iterator[Run]:
    run = Run(bough, config, *overrides)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()
        run.log.close()


@pytest.fixture
def experiment(bough):
    """A model that answers with a letter. All letters are about equally likely."""

    def write(**settings: Any) -> Path:
        bough("init", "base", "--hidden-size", 32, "--layers", 1, "--heads", 2, "--kv-heads", 1, ok=True)
        lines = []
        for letter in LETTERS:
            first = [{"role": "user", "content": "Say a letter."}, {"role": "assistant", "content": letter}]
            other = LETTERS[(LETTERS.index(letter) * 7 + 3) % 26]
            more = [{"role": "user", "content": "Another one."}, {"role": "assistant", "content": other}]
            lines += [{"messages": first}, {"messages": first + more}]
        (bough.cwd / "letters.jsonl").write_text("\n".join(map(json.dumps, lines)))
        bough(
            *("sft", "--model", "base", "--data", "letters.jsonl", "--out", "warm"),
            *("--max-steps", 80, "--lr", 1e-2),
            ok=True,
            env=ENVIRONMENT,
        )
        config = bough.cwd / "config.yaml"
        defaults = {
            "experiment_name": "agents",
            "model.path": "warm",
            "serve.port": 0,
            "gconfig.n_samples": 8,
            "gconfig.max_new_tokens": 4,
            "train_dataset.batch_size": 2,
            "actor.optimizer.lr": 1e-2,
            "total_train_steps": 2,
            "saver.freq_steps": 1,
        }
        config.write_text(to_yaml({**defaults, **settings}))
        return config

    return write


@in_chromium
def test_the_page_talks_to_the_weights_of_the_run(bough, experiment, tmp_path):
    config = experiment(**{"report.port": 0}, **{"rollout.max_head_offpolicyness": 1})
    with running(bough, config) as run, Browser(tmp_path / "profile") as page:
        folder = bough.cwd / "runs/agents/trial0"
        page_url = folder / "control/page_url"
        wait_until(page_url.exists, run.process)
        page.open(page_url.read_text().strip())
        page.wait_for("!document.getElementById('talk').hidden")
        assert json.loads((folder / "control/server.json").read_text())["url"] == run.url
        page.run("document.querySelector('#talk textarea').value = 'Say a <b>letter</b>.'")
        page.run(
            "[...document.querySelectorAll('#talk button')].find(one => one.textContent === 'send').click()"
        )
        texts = "[...document.querySelectorAll('#talk .message pre')].map(one => one.textContent)"
        page.wait_for(f"{texts}.length === 2 && !panels.find(one => one.id === 'talk').stop")
        question, answer = page.run(texts)
        assert question == "Say a <b>letter</b>." and answer
        assert page.run("panels.find(one => one.id === 'talk').messages.map(one => one.role)") == [
            "user",
            "assistant",
        ]
        assert "requests_without_session_total 1\n" in run.metrics()
        assert [run.episode(task) for task in ["a"] * 8 + ["b"] * 8] == [200] * 16
        assert page.errors() == []


STEPS = 14


@pytest.mark.parametrize(("client", "eta"), [("openai", 1), ("anthropic", 0)])
def test_an_agent_of_an_official_client_learns(bough, experiment, client, eta):
    config = experiment(
        **{"rollout.max_head_offpolicyness": eta, "total_train_steps": STEPS, "gconfig.n_samples": 16},
        **{"actor.optimizer.lr": 4e-3},
    )
    with running(bough, config) as run:
        agent = subprocess.run(
            [sys.executable, str(EXAMPLE), run.url, "--client", client, "--workers", "8"],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert agent.returncode == 0, agent.stdout + agent.stderr
        summary = run.wait()
    records = read_metrics(bough.cwd / "runs/agents/trial0")
    rewards = [record["reward/mean"] for record in records]
    assert summary["steps"] == STEPS
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.4, rewards
    assert all(record["conversation/turns_mean"] == 2 for record in records)
    assert sum(record["agents/leases_granted"] for record in records) >= 2 * STEPS
    # The next prompt shows each answer as it was sampled, token by token. An episode is therefore one row.
    assert records[-1]["conversation/rows_mean"] < 1.5


def test_new_weights_meet_requests_of_agents(bough, experiment):
    """Agents request long answers while the trainer works. Some requests are running when it publishes."""
    config = experiment(
        **{"rollout.max_head_offpolicyness": 2, "gconfig.max_new_tokens": 400, "gconfig.ignore_eos": True},
        **{"total_train_steps": 10},
    )
    with running(bough, config) as run:
        over = threading.Event()

        def agent() -> None:
            with contextlib.suppress(OSError, AssertionError):  # the run ends during a request
                while not over.is_set():
                    if run.episode() != 200:
                        time.sleep(0.05)

        agents = [threading.Thread(target=agent) for _ in range(12)]
        for each in agents:
            each.start()
        summary = run.wait()
        over.set()
        for each in agents:
            each.join()
    assert summary["steps"] == 10
    records = read_metrics(bough.cwd / "runs/agents/trial0")
    assert sum(record["rollout/interrupted_samples"] for record in records) > 0


def test_a_gym_like_loop_trains(bough, experiment):
    """Episodes of several turns, a reward for each turn, and advantages by turn."""
    config = experiment(
        **{"actor.adv_estimator": "turn_returns", "actor.turn_discount": 0.9, "gconfig.max_new_tokens": 2}
    )
    with running(bough, config) as run:
        loop = subprocess.run(
            [sys.executable, str(GYM_LOOP), run.url], capture_output=True, text=True, timeout=120
        )
        assert loop.returncode == 0, loop.stdout + loop.stderr
        assert run.wait()["steps"] == 2
    records = read_metrics(bough.cwd / "runs/agents/trial0")
    assert all(record["conversation/turns_mean"] > 1 for record in records)


@pytest.mark.parametrize("eta", [0, 1])
def test_agents_are_served_by_the_engines_of_several_ranks(bough, experiment, eta):
    config = experiment(**{"rollout.max_head_offpolicyness": eta, "total_train_steps": 3})
    with running(bough, config, "--ranks", "2") as run, ThreadPoolExecutor(6) as pool:

        def agent() -> int:
            held = 0
            with contextlib.suppress(OSError):  # the run ends during a request
                while True:
                    held += run.episode() == 200

            return held

        agents = [pool.submit(agent) for _ in range(6)]
        assert run.wait()["steps"] == 3
        assert sum(each.result() for each in agents) >= 3 * 2 * 8
    records = read_metrics(bough.cwd / "runs/agents/trial0")
    assert all("ranks/bytes_sent" in record for record in records)
    assert sum(record["agents/leases_granted"] for record in records) >= 6


def test_problems_come_with_sessions_and_groups_hold_together(bough, experiment):
    (bough.cwd / "train.jsonl").write_text(
        "\n".join(f'{{"question": "Q{i}", "answer": "A{i}"}}' for i in range(4))
    )
    config = experiment(
        **{"train_dataset.path": "train.jsonl", "train_dataset.shuffle": False, "total_train_steps": 1}
    )
    with running(bough, config) as run:
        while "bough_serve_groups_free 2" not in run.metrics():
            time.sleep(0.02)
        sessions = []
        for task in ["", "mine"] * 8:
            status, started = run.ask("/rl/start_session", {"task_id": task})
            assert status == 200
            sessions.append(started)
        assert run.ask("/rl/start_session", {})[0] == 429
        assert {started["problem"]["question"] for started in sessions[::2]} == {"Q0"}
        assert len({started["group_id"] for started in sessions}) == 2
        for started in sessions:
            body = {"messages": [{"role": "user", "content": "Say a letter."}]}
            assert run.ask("/v1/chat/completions", body, started["api_key"])[0] == 200
            assert run.ask("/rl/set_reward", {"reward": 1}, started["api_key"])[0] == 200
            assert run.ask("/rl/end_session", {}, started["api_key"])[0] == 200
        run.wait()
    record = read_metrics(bough.cwd / "runs/agents/trial0")[-1]
    assert record["agents/leases_refused"] == 1
    assert record["reward/mean"] == 1


def test_a_run_that_was_killed_goes_on_and_its_old_sessions_are_gone(bough, experiment):
    (bough.cwd / "valid.jsonl").write_text('{"question": "Say a letter.", "answer": "1"}')
    config = experiment(
        **{
            "total_train_steps": 3,
            "gconfig.n_samples": 2,
            "valid_dataset.path": "valid.jsonl",
            "valid_dataset.format": "chat",
            "evaluator.freq_steps": 1,
        }
    )
    with running(bough, config) as run:
        for _ in range(4):
            while run.episode() == 429:  # the first evaluation is still running
                time.sleep(0.02)
        deadline = time.monotonic() + 60
        while not (bough.cwd / "runs/agents/trial0/latest").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        while (status := run.ask("/rl/start_session", {"task_id": "old"}))[0] == 429:
            time.sleep(0.05)
        old = status[1]["api_key"]
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
    with running(bough, config) as run:
        for path in ("/v1/chat/completions", "/rl/end_session"):
            status, answer = run.ask(path, {}, old)
            assert (status, answer["error"]["code"]) == (410, "session_ended")
        while run.process.poll() is None:
            try:
                if run.episode() == 429:
                    time.sleep(0.02)
            except OSError:
                break  # the run has ended
        assert run.wait()["steps"] == 3
    records = read_metrics(bough.cwd / "runs/agents/trial0")
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert all("eval/avg_at_k" in record for record in records)


def test_leases_end_and_the_run_waits_for_agents(bough, experiment):
    """Unfinished groups are dropped and counted. Their slots become free again."""
    config = experiment(
        **{"gconfig.n_samples": 2, "serve.lease_seconds": 0.5, "total_train_steps": 1, "stall_seconds": 1}
    )
    with running(bough, config) as run:
        time.sleep(2)  # no agent is connected: the run waits, whatever stall_seconds says
        assert run.ask("/rl/start_session", {})[0] == 200
        assert run.episode("without", rewards=False) == 200
        assert run.episode("without", rewards=False) == 200
        time.sleep(1)
        assert "bough_serve_groups_begun 0" in run.metrics()
        while run.process.poll() is None:
            try:
                if run.episode() == 429:
                    time.sleep(0.02)
            except OSError:
                break
        run.wait()
    record = read_metrics(bough.cwd / "runs/agents/trial0")[-1]
    assert record["agents/leases_expired"] == 1
    assert record["refused/lease_expired"] == 1
    assert record["refused/too_few_rewards"] == 1


def test_invalid_settings_are_refused(bough, experiment):
    config = experiment()
    for overrides, message in [
        (["serve.host=0.0.0.0"], "there is no key"),
        (["total_train_steps=0"], "there are no epochs"),
        (["environment.type=guess"], "external agents and an environment cannot both"),
        (["serve.port=70000"], "serve.port"),
        (["serve.tool_call_parser=hermos"], "hermos"),
    ]:
        result = bough("train", config, *overrides)
        assert result.returncode == 2, result
        assert message in result.stderr

"""Runs whose samples are conversations: repeatable, resumable and asynchronous, with every kind of
environment."""

import http.server
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from run_util import (
    ENVIRONMENT,
    comparable_metrics,
    final_state,
    read_metrics,
    read_rollouts,
    to_yaml,
    write_experiment,
)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# This environment accepts any answer, since an untrained model's text is noise. It is slow, with random
# delays.
ECHO = """
import os, random, time

class Echo:
    def reset(self, problem, seed):
        self.turns = 0
        return {"messages": "say " + problem["answer"]}

    def step(self, action):
        time.sleep(random.random() / 50)
        self.turns += 1
        if FAULTS and random.random() < 0.2:
            if random.random() < 0.5:
                os._exit(1)
            raise ValueError("broken")
        return "go on", len(action["text"]) % 3 / 2, self.turns == 3
"""


@pytest.fixture
def experiment(bough):
    def write(environment, **settings):
        config = write_experiment(
            bough,
            **{f"environment.{key}": value for key, value in environment.items()},
            **{"model.path": "warm", "gconfig.max_new_tokens": 6, "evaluator.freq_steps": 0} | settings,
        )
        # Enough training to end a turn now and then.
        bough("data", "guess", "--out", "traces.jsonl", "-n", 60, "--traces", ok=True)
        bough(
            *("sft", "--model", "base", "--data", "traces.jsonl", "--out", "warm"),
            *("--max-steps", 60, "--lr", 1e-2),
            ok=True,
            env=ENVIRONMENT,
        )
        bough("data", "guess", "--out", "train.jsonl", "-n", 40, ok=True)
        bough("data", "guess", "--out", "valid.jsonl", "-n", 4, "--split", "test", ok=True)
        return config

    (bough.cwd / "echo.py").write_text(ECHO.replace("FAULTS", "False"))
    (bough.cwd / "faulty.py").write_text(ECHO.replace("FAULTS", "True"))
    return write


def echo(file="echo.py", **settings):
    return {"type": "python", "path": f"{file}:Echo", "python": sys.executable, "workers": 6, **settings}


def rollouts(bough, run, step):
    return read_rollouts(bough.cwd / run / f"rollouts/step_{step}.jsonl.zst")


def test_a_synchronous_run_is_repeatable_and_goes_on(bough, experiment):
    """The result does not depend on how long tools take, because turns are taken in rounds."""
    config = experiment(echo(), **{"total_train_steps": 4})
    for trial in ("first", "second"):
        bough("train", config, f"trial_name={trial}", ok=True, env=ENVIRONMENT)
    bough("train", config, "trial_name=third", "total_train_steps=2", ok=True, env=ENVIRONMENT)
    bough("train", config, "trial_name=third", ok=True, env=ENVIRONMENT)
    first, second, third = (bough.cwd / "runs/tiny" / trial for trial in ("first", "second", "third"))
    assert comparable_metrics(first) == comparable_metrics(second)
    assert final_state(first) == final_state(second)
    assert final_state(first)["model/model.safetensors"] == final_state(third)["model/model.safetensors"]
    assert any(record.get("conversation/turns_mean", 0) > 1 for record in read_metrics(first))


def test_an_asynchronous_run_survives_environments_that_fail(bough, experiment):
    config = experiment(
        echo("faulty.py"),
        **{"rollout.max_head_offpolicyness": 2, "evaluator.at_start": False, "evaluator.at_end": False},
    )
    bough("train", config, ok=True, env=ENVIRONMENT)
    records = read_metrics(bough.cwd / "runs/tiny/trial0")
    assert len(records) == 7
    reasons = {name for record in records for name in record if name.startswith("conversation/reason/")}
    assert {"conversation/reason/environment_crash", "conversation/reason/environment_error"} <= reasons
    assert sum(record["reward/failures"] for record in records) > 0
    assert not subprocess.run(["pgrep", "-f", str(bough.cwd / "faulty.py")], capture_output=True).stdout


def test_an_endpoint_holds_conversations(bough, experiment):
    """Every conversation that a run and its evaluations opened is closed."""
    turns, episodes = {}, set()

    class Endpoint(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            episode, reply = request["episode"], {"id": request["id"]}
            if request["method"] == "reset":
                turns[episode] = 0
                episodes.add(episode)
                reply["messages"] = "say " + request["problem"]["answer"]
            elif request["method"] == "step":
                turns[episode] += 1
                reply |= {"messages": "go on", "reward": 0.5, "done": turns[episode] == 2}
            else:
                del turns[episode]
            body = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/env"
        config = experiment({"type": "http", "url": url, "workers": 12}, total_train_steps=3)
        bough("train", config, ok=True, env=ENVIRONMENT)
        server.shutdown()
    assert len(episodes) >= 3 * 3 * 4
    assert turns == {}
    records = read_metrics(bough.cwd / "runs/tiny/trial0")
    assert all(record.get("reward/failures", 0) == 0 for record in records)


MCP_SERVER = """
import json, sys

TOOL = {"name": "look", "description": "Looks.", "inputSchema": {"type": "object", "properties": {}}}
for line in sys.stdin:
    request = json.loads(line)
    result = {
        "initialize": {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "s"},
        },
        "tools/list": {"tools": [TOOL]},
        "tools/call": {"content": [{"type": "text", "text": "seen"}]},
    }.get(request["method"])
    if "id" in request:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""


def test_the_tools_of_an_mcp_server(bough, experiment):
    """The run's reward function scores the model's last message."""
    server = bough.cwd / "server.py"
    server.write_text(MCP_SERVER)
    (bough.cwd / "length.py").write_text("def score(completion): return len(completion) / 100\n")
    settings = {
        "type": "mcp",
        "command": f"exec {sys.executable} {server}",
        "workers": 12,
        "server": "worker",
        "tool_call_parser": "hermes",
    }
    config = experiment(settings, total_train_steps=2, reward="length.py:score")
    bough("train", config, ok=True, env=ENVIRONMENT | {"BOUGH_PYTHON": sys.executable})
    records = [record for record in read_metrics(bough.cwd / "runs/tiny/trial0") if "reward/mean" in record]
    assert len(records) == 2
    assert all(record["reward/failures"] == 0 and record["reward/mean"] > 0 for record in records)
    assert not subprocess.run(["pgrep", "-f", str(server)], capture_output=True).stdout


def interpreter_with(module, variable):
    """Returns the tests' interpreter, or the one that a variable names. The tests do not require these
    packages."""
    if os.environ.get(variable):
        return os.environ[variable]
    if importlib.util.find_spec(module):
        return sys.executable
    pytest.skip(f"needs {module}, in the interpreter that {variable} names")


def train_on(bough, problems, path="", **settings):
    bough("init", "base", "--hidden-size", 32, "--layers", 1, "--heads", 2, "--kv-heads", 1, ok=True)
    defaults = {
        "experiment_name": "tiny",
        "model.path": "base",
        "train_dataset.path": problems,
        "train_dataset.batch_size": 2,
        "gconfig.n_samples": 4,
        "gconfig.max_new_tokens": 1,
        "gconfig.stop_token_ids": list(range(272)),
        "actor.optimizer.lr": 1e-3,
        "total_train_steps": 3,
    }
    config = bough.cwd / "config.yaml"
    config.write_text(to_yaml({**defaults, **settings}))
    bough("train", config, ok=True, env=ENVIRONMENT | {"PYTHONPATH": str(path)})
    records = read_metrics(bough.cwd / "runs/tiny/trial0")
    assert len(records) == 3
    assert all(record.get("reward/failures", 0) == 0 for record in records)
    return records


def test_an_environment_of_reasoning_gym(bough):
    python = interpreter_with("reasoning_gym", "BOUGH_REASONING_GYM_PYTHON")
    script = EXAMPLES / "reasoning_gym_task.py"
    subprocess.run(
        [python, script, "chain_sum", "--out", bough.cwd, "--train", "8", "--test", "0", "--examples", "0"]
    )
    records = train_on(
        bough,
        "train.jsonl",
        **{
            "environment.type": "python",
            "environment.path": f"{script}:ReasoningGym",
            "environment.python": python,
            "environment.workers": 4,
        },
    )
    assert all(record["conversation/turns_mean"] > 1 for record in records), "a wrong answer may be mended"


VERIFIERS_ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset


def load_environment(words=4):
    rows = [{"question": f"say {number}", "answer": str(number)} for number in range(words)]

    def short(completion, **_):
        return 1 / (1 + len(completion[-1]["content"] or ""))

    class Twice(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **_):
            return [{"role": "user", "content": "again"}]

    return Twice(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[short]), max_turns=2)
"""


def test_an_environment_of_verifiers(bough):
    python = interpreter_with("verifiers", "BOUGH_VERIFIERS_PYTHON")
    script = EXAMPLES / "verifiers/verifiers_environment.py"
    (bough.cwd / "twice.py").write_text(VERIFIERS_ENVIRONMENT)
    command = [python, script, "twice", "--out", bough.cwd / "problems.jsonl", "words=6"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(bough.cwd)})
    records = train_on(
        bough,
        "problems.jsonl",
        bough.cwd,
        **{
            "environment.type": "python",
            "environment.path": f"{script}:VerifiersEnvironment",
            "environment.python": f"{python}",
            "environment.workers": 4,
        },
    )
    assert all(record["conversation/turns_mean"] == 2 for record in records)
    assert all(record["reward/short/mean"] == pytest.approx(record["reward/mean"]) for record in records)


def test_rows_of_a_conversation(bough, experiment):
    """Tokens, masks and turns of the rows that a run trained on, and the conversation as people read it."""
    config = experiment(echo(), **{"total_train_steps": 1})
    bough("train", config, ok=True, env=ENVIRONMENT)
    rows = rollouts(bough, "runs/tiny/trial0", 1)
    found = {(row["group"], row["trajectory"]) for row in rows}
    assert found >= {(rows[0]["group"], str(i)) for i in range(4)}
    for row in rows:
        turns = zip(row["turns"], row["loss_mask"], strict=True)
        assert all((turn >= 0) == bool(mask) for turn, mask in turns)
        assert len(row["turn_rewards"]) == row["reward"] == 0 or sum(row["turn_rewards"]) == row["reward"]
    last = [row["conversation"] for row in rows if "reason" in row["conversation"]]
    assert len(last) == 3 * 4
    assert {about["reason"] for about in last} <= {"done", "max_new_tokens"}
    assert all(about["messages"][0]["role"] == "user" for about in last)


def test_obrs_reads_the_top_tokens_of_every_turn(bough, experiment):
    config = experiment(
        echo(), **{"total_train_steps": 2, "actor.correction": "obrs", "gconfig.top_logprobs": 20}
    )
    bough("train", config, ok=True, env=ENVIRONMENT)
    records = [r for r in read_metrics(bough.cwd / "runs/tiny/trial0") if "mismatch/obrs_acceptance" in r]
    assert len(records) == 2
    assert all(0.9 < record["mismatch/obrs_acceptance"] <= 1 for record in records)
    later = 0
    for row in rollouts(bough, "runs/tiny/trial0", 1):
        later += max(row["turns"]) > 0
        for mask, top in zip(row["loss_mask"], row["top_ids"], strict=True):
            assert len(top) == (20 if mask else 0)
    assert later > 0


def test_an_unusable_environment_ends_the_run_at_its_start(bough, experiment):
    config = experiment({"type": "python", "path": "echo.py:Nothing", "python": sys.executable})
    for overrides, message in [
        ([], "no class 'Nothing' in it; it has: Echo"),
        (["environment.path="], "environment.path is missing"),
        (["environment.path=echo.py:Echo", "environment.tool_call_parser=hermos"], "hermos"),
    ]:
        result = bough("train", config, *overrides)
        assert result.returncode == 2
        assert message in result.stderr


def test_the_example_is_an_environment(bough):
    """The example is traced with an untrained model, and trained on for one step."""
    script = EXAMPLES / "ticket_desk/ticket_desk.py"
    lines = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout
    (bough.cwd / "tickets.jsonl").write_text("".join(lines.splitlines(keepends=True)[:4]))
    config = write_experiment(
        bough,
        **{
            "train_dataset.path": "tickets.jsonl",
            "train_dataset.batch_size": 2,
            "valid_dataset.path": "",
            "environment.type": "python",
            "environment.path": f"{script}:TicketDesk",
            "environment.python": sys.executable,
            "total_train_steps": 1,
        },
    )
    # The template of `bough init` names no format of tool calls, and the environment has tools.
    refused = bough("train", config, env=ENVIRONMENT)
    assert refused.returncode == 2
    assert "set environment.tool_call_parser" in refused.stderr
    bough("train", config, "environment.tool_call_parser=hermes", ok=True, env=ENVIRONMENT)
    traced = bough(
        *("rollout", "--model", "base", "--prompts", "tickets.jsonl", "--out", "out.jsonl"),
        *("--max-new-tokens", 4),
        *("--trace", "--environment", "python", f"path={script}:TicketDesk", f"python={sys.executable}"),
        "tool_call_parser=hermes",
        ok=True,
        env=ENVIRONMENT,
    ).stdout
    assert traced.count("[user] A ticket about") == 4
    assert traced.count("[assistant (turn 0)]") == 4


def test_a_tiny_model_learns_from_conversations(bough):
    """The reward of an easy task rises. This covers the whole way from an environment's reward to the
    weights."""
    (bough.cwd / "vowel.py").write_text(
        "class Vowel:\n"
        "    def reset(self, problem, seed):\n"
        "        self.turns = 0\n"
        "        return 'vowel'\n"
        "    def step(self, action):\n"
        "        self.turns += 1\n"
        "        return 'more', float(action['text'][:1] in 'aeiou'), self.turns == 2\n"
    )
    bough("init", "base", "--hidden-size", 32, "--layers", 1, "--heads", 2, "--kv-heads", 1, ok=True)
    lines = [json.dumps({"question": f"q{i}", "answer": "a"}) for i in range(8)]
    (bough.cwd / "train.jsonl").write_text("\n".join(lines))
    config = bough.cwd / "config.yaml"
    config.write_text(
        to_yaml(
            {
                "experiment_name": "tiny",
                "model.path": "base",
                "train_dataset.path": "train.jsonl",
                "train_dataset.batch_size": 4,
                "environment.type": "python",
                "environment.path": "vowel.py:Vowel",
                "environment.python": sys.executable,
                "gconfig.n_samples": 32,
                "gconfig.max_new_tokens": 1,
                "gconfig.stop_token_ids": list(range(33, 127)),
                "actor.optimizer.lr": 1e-2,
                "total_train_steps": 25,
            }
        )
    )
    bough("train", config, ok=True, env=ENVIRONMENT)
    rewards = [record["reward/mean"] for record in read_metrics(bough.cwd / "runs/tiny/trial0")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3

